"""Memory from outside of a region that its recompute pass finds again: inputs that are held, and buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from memplug.execute.core import core

IN_PLACE = "one of the variables needed for gradient computation has been modified by an inplace operation"


class Held:
    """A region input that is kept by reference."""

    __slots__ = ("tensor", "version", "requires_grad", "written")

    def __init__(self, tensor: torch.Tensor):
        # a parameter is held itself: what shards or offloads parameters exchanges their memory
        itself = type(tensor) is not torch.Tensor and isinstance(tensor, torch.nn.Parameter)
        self.tensor = tensor if itself else tensor.detach()
        self.version, self.requires_grad = tensor._version, tensor.requires_grad
        self.written = False  # the forward writes to it

    def before_write(self) -> None:
        """The region is about to write to its input in place: remember the value of now."""
        self.tensor, self.written = copy_of(self.tensor.detach()), True
        self.version = self.tensor._version

    def get(self) -> torch.Tensor:
        """The tensor; an error where autograd would raise one too: it was modified in place since."""
        check_version(self.tensor, self.version)
        return self.tensor


class Buffers:
    """What one forward wrote to in place, such as running statistics, and the values before: a recompute pass must find
    those, and leave no trace.
    """

    def __init__(self) -> None:
        self._before: list[tuple[torch.Tensor, torch.UntypedStorage]] = []

    def note(self, tensor: torch.Tensor) -> None:
        """The forward is about to write to the tensor, for the first time."""
        self._before.append((alias_of(tensor), tensor.untyped_storage().clone()))

    def as_before(self) -> contextlib.AbstractContextManager[None]:
        """Every buffer has its former value meanwhile, and no version of it counts."""
        return self._as_before() if self._before else contextlib.nullcontext()

    @contextlib.contextmanager
    def _as_before(self) -> Iterator[None]:
        now = [(tensor, before, tensor.untyped_storage().clone()) for tensor, before in self._before]
        with torch.autograd._unsafe_preserve_version_counter(tuple(tensor for tensor, _ in self._before)):
            try:
                for tensor, before, _ in now:
                    tensor.untyped_storage().copy_(before)
                yield
            finally:
                for tensor, _, after in now:
                    tensor.untyped_storage().copy_(after)


def check_version(tensor: torch.Tensor, version: int) -> None:
    """Raise what autograd raises for a tensor that was modified in place since it had that version."""
    if tensor._version != version:
        raise RuntimeError(
            f"{IN_PLACE}: {tuple(tensor.shape)} is at version {tensor._version}; expected version {version}"
        )


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that lies in memory as the original does: views of the one fit the other."""
    storage = tensor.untyped_storage().clone()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        storage, tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def leaf_of(tensor: torch.Tensor, requires_grad: bool, written: bool) -> torch.Tensor:
    """A region input for a recompute pass: a leaf of its graph, or a copy where the pass writes to it, which autograd
    forbids for leaves.
    """
    leaf = tensor.detach().requires_grad_(requires_grad)
    if not written:
        return leaf
    with torch.enable_grad():
        return leaf.clone()


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory and version counter, without the graph. Inside a dispatch mode `detach` alone makes a version
    counter of its own, and a write by the rest of the program would go unnoticed."""
    known = core()
    if known is not None:
        return known.alias(tensor)
    excluded = torch._C._dispatch_tls_local_exclude_set().remove(torch._C.DispatchKey.ADInplaceOrView)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        return tensor.detach()
