"""Modes that notice what the native core does not: an address that is taken; without it, memory that is written to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from memplug.tokenwise.regions import operators
from memplug.tokenwise.regions.tape import storage_of

_GIVES_ADDRESSES = {torch.Tensor.data_ptr, torch.Tensor.__dlpack__, torch.utils.dlpack.to_dlpack}
_READS = {torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.tolist, torch.Tensor.data.__get__}  # type: ignore[attr-defined]


class AddressMode(TorchFunctionMode):
    """Tells the core when an address is taken, or values are read past operators."""

    def __init__(self, native: Any):
        super().__init__()
        self._native = native

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _GIVES_ADDRESSES:
            self._native.address_taken(args[0])
        elif func in _READS:
            self._native.read(args[0])
        return func(*args, **(kwargs or {}))


class WriteMode(TorchDispatchMode):
    """Tells of the first write to each memory that was there before."""

    def __init__(self, before_write: Callable[[torch.Tensor], None]):
        super().__init__()
        self._before_write = before_write
        self._known: set[int] = set()  # storages by address
        self._addresses: list[StorageWeakRef] = []  # which no other storage gets meanwhile

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if operators.is_mutable(func):
            for tensor in operators.written_arguments(func, args, kwargs):
                if storage_of(tensor) not in self._known:
                    self._know(tensor)
                    self._before_write(tensor)
        before = {storage_of(tensor) for tensor in operators.tensors_in([*args, *kwargs.values()])}
        out = func(*args, **kwargs)
        for tensor in operators.tensors_in([out]):
            if storage_of(tensor) not in before:
                self._know(tensor)
        return out

    def _know(self, tensor: torch.Tensor) -> None:
        self._known.add(storage_of(tensor))
        self._addresses.append(StorageWeakRef(tensor.untyped_storage()))
