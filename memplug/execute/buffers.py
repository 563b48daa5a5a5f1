"""Memory from outside that a region's forward writes to in place, such as running statistics and counters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from memplug.execute.transfer import alias_of


class Buffers:
    """What one forward wrote to, and the values before: a recompute pass must find those, and leave no trace."""

    def __init__(self) -> None:
        self._before: list[tuple[torch.Tensor, torch.UntypedStorage]] = []

    def note(self, tensor: torch.Tensor) -> None:
        """The forward is about to write to the tensor, for the first time."""
        self._before.append((alias_of(tensor), tensor.untyped_storage().clone()))

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        """Every buffer has its former value meanwhile, and no version of it counts."""
        now = [(tensor, before, tensor.untyped_storage().clone()) for tensor, before in self._before]
        with torch.autograd._unsafe_preserve_version_counter(tuple(tensor for tensor, _ in self._before)):
            try:
                for tensor, before, _ in now:
                    tensor.untyped_storage().copy_(before)
                yield
            finally:
                for tensor, _, after in now:
                    tensor.untyped_storage().copy_(after)
