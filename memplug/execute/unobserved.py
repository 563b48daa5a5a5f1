"""A forward without the native core: its input alone is swapped, and its recompute pass runs the module again.

Copies are those of torch, and the host waits for each: right everywhere, and slow. With the native core they overlap
with computation (`memplug/native/transfer.h`).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from memplug.errors import RecomputeError
from memplug.execute.frame import Frame
from memplug.execute.saved import Held, check_version
from memplug.execute.tape import is_plain, storage_of
from memplug.execute.watch import WriteMode


class Copy:
    """A region input on the host."""

    def __init__(self, copies: Copies, tensor: torch.Tensor):
        self.copies, self.device = copies, tensor.device
        self.data = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda").copy_(tensor)
        self.nbytes = tensor.nbytes

    def __del__(self) -> None:
        self.copies.used_bytes -= self.nbytes


class Copies:
    """What an executor without the native core has instead of a transfer, its pool and its flow; see those
    (`memplug/native/transfer.h`, `memplug.execute.host_pool`, `memplug/native/flow.h`).

    Args:
        budget_bytes: bound of the host memory of all copies.
    """

    def __init__(self, budget_bytes: int):
        self.budget_bytes = budget_bytes
        self.share = 1.0
        self.forwards = self.live = self.unplanned = self.expected_bytes = 0
        self.used_bytes = self.peak_bytes = 0
        self.offloads = self.offloaded_total_bytes = self.prefetched_total_bytes = 0
        self.refused = self.refused_bytes = self.hurried = 0
        self.fetched_bytes = self.input_bytes = self.recomputed_bytes = self.waiting = 0

    @property
    def capacity_bytes(self) -> int:
        """Each copy has memory of its own."""
        return self.used_bytes

    def offload(self, tensor: torch.Tensor) -> Copy | None:
        """Copy a tensor to the host; None where the budget has no room."""
        if self.used_bytes + tensor.nbytes > self.budget_bytes:
            self.refused += 1
            self.refused_bytes += tensor.nbytes
            return None
        self.used_bytes += tensor.nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        self.offloads += 1
        self.offloaded_total_bytes += tensor.nbytes
        return Copy(self, tensor)

    def prefetch(self, copy: Copy) -> torch.Tensor:
        """A new tensor on the device."""
        self.prefetched_total_bytes += copy.nbytes
        return copy.data.to(copy.device, copy=True)

    def reserve(self, nbytes: int) -> None:
        """Nothing is reserved."""

    def take_peak_bytes(self) -> int:
        """The most that was in use so far."""
        return self.peak_bytes

    def drain(self) -> None:
        """Nothing is left over."""

    def close(self) -> None:
        """Copies go with their graphs."""


class Holder:
    """What autograd holds for a saved tensor of the region; `index` is its place among all."""

    __slots__ = ("frame", "index", "size", "dtype", "__weakref__")

    def __init__(self, frame: Unobserved, index: int, tensor: torch.Tensor):
        self.frame, self.index, self.size, self.dtype = frame, index, tensor.shape, tensor.dtype


class Unobserved(Frame):
    """See the module's text."""

    opaque = True

    def __init__(self, *args: Any):
        self._holders: list[weakref.ref[Holder] | None] = []
        self._recomputed: dict[int, tuple[torch.Tensor, int]] = {}  # saved tensors and their versions
        self._swapped: set[int] = set()  # addresses of inputs that have a copy, while the forward runs
        super().__init__(*args)
        self._copies: Copies = self.executor.transfer
        self._copies.forwards += 1
        self._copies.live += 1

    def __del__(self) -> None:
        if hasattr(self, "_copies"):
            self._copies.live -= 1

    def _enter(self, value: torch.Tensor, swaps: bool) -> Copy | None:
        large = is_plain(type(value)) and value.nbytes >= max(1, self.executor.min_offload_bytes)
        if not (swaps and large and value.device.type == self.executor.device.kind):
            return None
        self.offered += 1
        self.offered_bytes += value.nbytes
        copy = self.executor.transfer.offload(value.detach())
        if copy is not None:
            self._swapped.add(storage_of(value))
        return copy

    def _acquire(self, part: Copy) -> torch.Tensor:
        return self._copies.prefetch(part)

    def _consume(self, part: Copy) -> None:
        """Another backward finds the same copy."""

    def forward(self, args: Any, kwargs: Any) -> Any:
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        with self.ambient.during_forward(), hooks, WriteMode(self):
            out = self.call(*args, **kwargs)
        self._swapped.clear()
        self.region.native.released = True  # its input has left
        with self.executor.own:
            self.executor.note(self)
        return out

    def before_write(self, tensor: torch.Tensor) -> None:
        """An operator is about to write to memory that was there before the region."""
        if storage_of(tensor) in self._swapped:
            self.writes_input = True
        elif not self.executor.is_scratch(tensor):
            self.note_foreign_write(tensor)

    def _pack(self, tensor: torch.Tensor) -> Any:
        index = len(self._holders)
        self._holders.append(None)
        if not is_plain(type(tensor)) or isinstance(tensor, torch.nn.Parameter) and not self.executor.regathers:
            return Held(tensor)
        holder = Holder(self, index, tensor)
        self._holders[index] = weakref.ref(holder)
        return holder

    def unpack(self, holder: Holder) -> torch.Tensor:
        """The tensor behind what autograd holds."""
        if holder.index not in self._recomputed:
            self._recomputed.clear()
            with self.executor.guard("recompute", self.region):
                self.rerun(len(self._holders), self._is_wanted, self._store)
        tensor, version = self._recomputed.pop(holder.index)
        check_version(tensor, version)
        if tensor.shape != holder.size or tensor.dtype != holder.dtype:
            raise RecomputeError(
                f"region {self.region.name}: a saved tensor was {tuple(holder.size)} {holder.dtype} in forward and "
                f"is {tuple(tensor.shape)} {tensor.dtype} when recomputed"
            )
        return tensor

    def _is_wanted(self, index: int) -> bool:
        holder = self._holders[index]
        return holder is not None and holder() is not None

    def _store(self, index: int, tensor: torch.Tensor) -> None:
        self._recomputed[index] = (tensor, tensor._version)


def _unpack(packed: Any) -> torch.Tensor:
    if isinstance(packed, Held):
        return packed.get()
    with packed.frame.executor.own:
        return packed.frame.unpack(packed)
