"""What a frame holds in place of tensors: it knows how to get the tensor back, or that it is too late for that."""

from __future__ import annotations

from typing import Any

import torch

from memplug.errors import InPlaceError
from memplug.execute.transfer import alias_of

IN_PLACE = "one of the variables needed for gradient computation has been modified by an inplace operation"


class Kept:
    """A captured tensor that stays on the device: small, or kept by plan."""

    __slots__ = ("tensor", "version", "written")

    whole = True

    def __init__(self, tensor: torch.Tensor):
        self.tensor = alias_of(tensor)
        self.version = tensor._version
        self.written = False  # the forward went on to write to it: a recompute pass will too

    def before_write(self) -> None:
        """An operator of the forward is about to write in place: remember the value of now."""
        self.tensor, self.written = copy_of(self.tensor), True
        self.version = self.tensor._version

    def get(self) -> torch.Tensor:
        """The tensor as it was captured."""
        if self.tensor._version != self.version:
            raise InPlaceError(
                f"a captured {tuple(self.tensor.shape)} tensor was modified in place after its region had ended"
            )
        return self.tensor

    def fresh(self) -> torch.Tensor:
        """For a recompute pass, which may go on to write to it as the forward did."""
        return copy_of(self.get()) if self.written else self.get().detach()


class Held:
    """A region input that is kept by reference."""

    __slots__ = ("tensor", "version", "requires_grad", "written")

    def __init__(self, tensor: torch.Tensor):
        # a parameter is held itself: what shards or offloads parameters exchanges their memory
        self.tensor = tensor if isinstance(tensor, torch.nn.Parameter) else tensor.detach()
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


class Capture:
    """The captured outputs of one operator; none: a collective whose result nobody asks for."""

    __slots__ = ("parts", "whole")

    def __init__(self, parts: list[Any], whole: bool):
        self.parts = parts  # per tensor that it returned: Swapped or Kept
        self.whole = whole


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
