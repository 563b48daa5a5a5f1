"""What autograd and a frame hold in place of tensors: things that know how to get the tensor back, or that it is too
late for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from memplug.errors import InPlaceError
from memplug.execute.transfer import Swapped, alias_of

if TYPE_CHECKING:
    from memplug.execute.frame import Frame

IN_PLACE = "one of the variables needed for gradient computation has been modified by an inplace operation"


class Kept:
    """A captured tensor that stays on the device: small, or kept by plan."""

    __slots__ = ("tensor", "version", "written")

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


class View:
    """What autograd holds for a saved view of a captured tensor."""

    __slots__ = ("frame", "part", "size", "stride", "offset")

    def __init__(self, frame: Frame, part: Swapped | Kept, tensor: torch.Tensor):
        self.frame, self.part = frame, part
        self.size, self.stride, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()


class Holder:
    """What autograd holds for a saved tensor that only a recompute pass can give back; `index` counts the frame's
    packs.
    """

    __slots__ = ("frame", "index", "size", "dtype", "__weakref__")

    def __init__(self, frame: Frame, index: int, tensor: torch.Tensor):
        self.frame, self.index, self.size, self.dtype = frame, index, tensor.shape, tensor.dtype


class Held:
    """A tensor from outside the region that is kept by reference: a saved tensor, or a region input."""

    __slots__ = ("tensor", "version", "requires_grad", "written")

    def __init__(self, tensor: torch.Tensor):
        # a parameter is held itself: what shards or offloads parameters exchanges their memory
        self.tensor = tensor if isinstance(tensor, torch.nn.Parameter) else tensor.detach()
        self.version, self.requires_grad = tensor._version, tensor.requires_grad
        self.written = False  # a region input that the forward writes to

    def before_write(self) -> None:
        """The region is about to write to its input in place: remember the value of now."""
        self.tensor, self.written = copy_of(self.tensor.detach()), True
        self.version = self.tensor._version

    def get(self) -> torch.Tensor:
        """The tensor; an error where autograd would raise one too: it was modified in place since."""
        check_version(self.tensor, self.version)
        return self.tensor


class Capture:
    """The captured outputs of one operator, in the shape of what it returned."""

    __slots__ = ("parts", "is_tuple", "whole", "rng_after")

    def __init__(self, parts: list[Any], is_tuple: bool, whole: bool, rng_after: torch.Tensor | None = None):
        self.parts = parts  # per output: Swapped, Kept, or the value itself where it is no tensor
        self.is_tuple = is_tuple
        self.whole = whole
        self.rng_after = rng_after  # generator state that the operator left behind, where it drew random numbers

    @property
    def absent(self) -> bool:
        """Nothing was captured: a collective whose result nobody asks for."""
        return not self.parts


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


def can_view(part: Swapped | Kept, tensor: torch.Tensor) -> bool:
    """Whether a tensor on the storage of a captured one can be had back from it without a recompute pass."""
    if tensor.is_conj() or tensor.is_neg():
        return False
    if isinstance(part, Swapped):
        return part.whole and not part.mutated and part.dtype == tensor.dtype
    return part.tensor.dtype == tensor.dtype


def unpack(packed: Any) -> torch.Tensor:
    """Autograd's unpack hook: what `Frame.pack` returned, as a tensor again."""
    if isinstance(packed, Held):
        return packed.get()
    with packed.frame.executor.own:
        return _restore(packed)


def _restore(packed: View | Holder) -> torch.Tensor:
    frame = packed.frame
    if frame.timed and frame.tape.backward_begin is None:
        frame.tape.backward_begin = frame.executor.device.stamp()
    frame.executor.pump(frame)
    if isinstance(packed, Holder):
        return frame.restore(packed)
    part = packed.part
    if isinstance(part, Kept):
        return part.get().as_strided(packed.size, packed.stride, packed.offset)
    if part.mutated:
        raise RuntimeError(IN_PLACE)
    tensor, _ = frame.executor.transfer.acquire(part)
    view = tensor.as_strided(packed.size, packed.stride, packed.offset)
    frame.consume(part)
    if part.tensor is None:
        frame.executor.lend(view)
    return view


def leaf_of(tensor: torch.Tensor, requires_grad: bool, written: bool) -> torch.Tensor:
    """A region input for a recompute pass: a leaf of its graph, or a copy where the pass writes to it, which autograd
    forbids for leaves.
    """
    leaf = tensor.detach().requires_grad_(requires_grad)
    if not written:
        return leaf
    with torch.enable_grad():
        return leaf.clone()


def is_parameter(tensor: torch.Tensor) -> bool:
    """Whether a saved tensor is a parameter, or a view of one."""
    return isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter)
