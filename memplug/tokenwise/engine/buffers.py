"""Saves the values of memory from outside of a region before its forward writes there, for the recompute pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from memplug.tokenwise.engine.calls import BuffersCalls
from memplug.tokenwise.engine.core import core
from memplug.torch_private import unsafe_preserve_version_counter

IN_PLACE = "one of the variables needed for gradient computation has been modified by an inplace operation"


class Buffers(BuffersCalls):
    """The memory that one forward writes to in place, such as running statistics, and its values before the forward.

    A recompute pass must start from these values, and after the pass the memory must have its later values again.
    """

    def __init__(self) -> None:
        self._before: list[tuple[torch.Tensor, torch.UntypedStorage]] = []

    def note(self, tensor: torch.Tensor) -> None:
        """Save a tensor's values, just before the forward first writes to it."""
        self._before.append((alias_of(tensor), tensor.untyped_storage().clone()))

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        """Enter a context in which every buffer has its earlier values; writes inside do not advance its version."""
        now = [(tensor, before, tensor.untyped_storage().clone()) for tensor, before in self._before]
        with unsafe_preserve_version_counter(tuple(tensor for tensor, _ in self._before)):
            try:
                for tensor, before, _ in now:
                    tensor.untyped_storage().copy_(before)
                yield
            finally:
                for tensor, _, after in now:
                    tensor.untyped_storage().copy_(after)


def check_version(tensor: torch.Tensor, version: int) -> None:
    """Raise autograd's error if a tensor was modified in place since it had this version."""
    if tensor._version != version:
        raise RuntimeError(
            f"{IN_PLACE}: {tuple(tensor.shape)} is at version {tensor._version}; expected version {version}"
        )


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same memory and version counter, without the graph.

    Inside a dispatch mode `detach` would make a separate version counter, and a write by the rest of the program would
    go unnoticed.
    """
    return core().alias(tensor)
