"""A mode that notices what the native core does not: an address that is taken."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_GIVES_ADDRESSES = {torch.Tensor.data_ptr, torch.Tensor.__dlpack__, torch.utils.dlpack.to_dlpack}


class AddressMode(TorchFunctionMode):
    """Tells the core when an address is taken."""

    def __init__(self, native: Any):
        super().__init__()
        self._native = native

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _GIVES_ADDRESSES:
            self._native.address_taken()
        return func(*args, **(kwargs or {}))
