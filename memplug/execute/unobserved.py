"""A forward without the native core: its input alone is swapped, and its recompute pass runs the module again."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from memplug.errors import RecomputeError
from memplug.execute.frame import Frame
from memplug.execute.saved import IN_PLACE, Held, check_version
from memplug.execute.tape import is_plain, storage_of
from memplug.execute.transfer import Swapped
from memplug.execute.watch import WriteMode


class View:
    """What autograd holds for a saved view of a region input."""

    __slots__ = ("frame", "part", "size", "stride", "offset")

    def __init__(self, frame: Unobserved, part: Swapped, tensor: torch.Tensor):
        self.frame, self.part = frame, part
        self.size, self.stride, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()


class Holder:
    """What autograd holds for any other saved tensor of the region; `index` is its place among all."""

    __slots__ = ("frame", "index", "size", "dtype", "__weakref__")

    def __init__(self, frame: Unobserved, index: int, tensor: torch.Tensor):
        self.frame, self.index, self.size, self.dtype = frame, index, tensor.shape, tensor.dtype


class Unobserved(Frame):
    """See the module's text."""

    opaque = True

    def __init__(self, *args: Any):
        self._holders: list[weakref.ref[Holder] | None] = []
        self._parts: dict[int, Swapped] = {}  # by address, while the forward runs
        self._counted: set[int] = set()
        self._recomputed: dict[int, tuple[torch.Tensor, int]] = {}  # saved tensors and their versions
        super().__init__(*args)

    def entered(self, value: torch.Tensor, part: Swapped | None) -> None:
        if part is not None:
            self._parts[storage_of(value)] = part

    def forward(self, args: Any, kwargs: Any) -> Any:
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        with self.ambient.during_forward(), hooks, WriteMode(self):
            out = self.call(*args, **kwargs)
        with self.executor.own:
            self.recomputes = any(holder is not None and holder() is not None for holder in self._holders)
            for item in self.inputs:
                if isinstance(item, Swapped):
                    item.uses += self.recomputes
            self._finish()
        self._parts.clear()
        self._counted.clear()
        return out

    def before_write(self, tensor: torch.Tensor) -> None:
        """An operator is about to write to memory that was there before the region."""
        part = self._parts.pop(storage_of(tensor), None)
        if part is not None:
            self.executor.transfer.before_write(part)
            self.writes_input = True
        elif not self.executor.is_scratch(tensor):
            self.note_foreign_write(tensor)

    def _pack(self, tensor: torch.Tensor) -> Any:
        index = len(self._holders)
        self._holders.append(None)
        if not is_plain(type(tensor)) or isinstance(tensor, torch.nn.Parameter) and not self.executor.regathers:
            return Held(tensor)
        part = self._parts.get(storage_of(tensor))
        self._count_saved(tensor, captured=part is not None)
        if part is not None and self.direct and _can_view(part, tensor):
            part.uses += 1
            return View(self, part, tensor)
        holder = Holder(self, index, tensor)
        self._holders[index] = weakref.ref(holder)
        return holder

    def _count_saved(self, tensor: torch.Tensor, captured: bool) -> None:
        """Count a saved storage once, as far as addresses tell."""
        address = storage_of(tensor)
        if address not in self._counted:
            self._counted.add(address)
            nbytes = tensor.untyped_storage().nbytes()
            self.saved_bytes += nbytes
            self.pending_bytes += 0 if captured else nbytes
            self.largest_saved_bytes = max(self.largest_saved_bytes, nbytes)

    def _take(self, index: int) -> torch.Tensor:
        if index not in self._recomputed:
            self._forget()
            self.restore()
        tensor, version = self._recomputed.pop(index)
        self.executor.ledger.recomputed_bytes -= tensor.nbytes
        self.executor.ledger.lend(tensor)
        check_version(tensor, version)
        return tensor

    def store(self, index: int, tensor: torch.Tensor) -> None:
        self._recomputed[index] = (tensor, tensor._version)
        self.executor.ledger.recomputed_bytes += tensor.nbytes

    def _forget(self) -> None:
        self.executor.ledger.recomputed_bytes -= sum(tensor.nbytes for tensor, _ in self._recomputed.values())
        self._recomputed.clear()

    def __del__(self) -> None:
        left_bytes = sum(tensor.nbytes for tensor, _ in self._recomputed.values())
        self.executor.in_flight.died(self, left_bytes)

    def recompute(self) -> None:
        self.rerun(len(self._holders), self._is_alive)

    def _is_alive(self, index: int) -> bool:
        holder = self._holders[index]
        return holder is not None and holder() is not None

    def unpack(self, packed: View | Holder) -> torch.Tensor:
        """The tensor behind what autograd holds."""
        self.fetch()
        if isinstance(packed, Holder):
            tensor = self._take(packed.index)
            if tensor.shape != packed.size or tensor.dtype != packed.dtype:
                raise RecomputeError(
                    f"region {self.region.name}: a saved tensor was {tuple(packed.size)} {packed.dtype} in forward and "
                    f"is {tuple(tensor.shape)} {tensor.dtype} when recomputed"
                )
            return tensor
        if packed.part.mutated:
            raise RuntimeError(IN_PLACE)
        tensor, _ = self.executor.transfer.acquire(packed.part)
        view = tensor.as_strided(packed.size, packed.stride, packed.offset)
        self.consume(packed.part)
        if packed.part.tensor is None:
            self.executor.ledger.lend(view)
        return view


def _unpack(packed: Any) -> torch.Tensor:
    if isinstance(packed, Held):
        return packed.get()
    with packed.frame.executor.own:
        return packed.frame.unpack(packed)


def _can_view(part: Swapped, tensor: torch.Tensor) -> bool:
    """Whether a tensor on the storage of a region input can be had back from its copy."""
    same = part.dtype == tensor.dtype and not tensor.is_conj() and not tensor.is_neg()
    return same and part.whole and not part.mutated
