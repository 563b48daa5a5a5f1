"""A function mode that tells the native core when Python takes a tensor's address or reads its values."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_GIVES_ADDRESSES = {torch.Tensor.data_ptr, torch.Tensor.__dlpack__, torch.utils.dlpack.to_dlpack}
_READS = {torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.tolist, torch.Tensor.data.__get__}  # type: ignore[attr-defined]


class AddressMode(TorchFunctionMode):
    """Notifies the core when a tensor's address is taken, or its values are read past operators."""

    def __init__(self, native: Any):
        super().__init__()
        self._native = native

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make a call; before it, notify the core if the call takes an address or reads values."""
        if func in _GIVES_ADDRESSES:
            self._native.address_taken(args[0])
        elif func in _READS:
            self._native.read(args[0])
        return func(*args, **(kwargs or {}))
