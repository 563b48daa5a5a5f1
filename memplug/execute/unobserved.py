"""A forward without the native core: its input alone is swapped, and its recompute pass runs the module again.

Copies are those of torch, and the host waits for each: right everywhere, and slow. With the native core they overlap
with computation (`memplug/native/transfer.h`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from memplug.errors import RecomputeError
from memplug.execute.ambient import Ambient
from memplug.execute.rerun import rerun
from memplug.execute.saved import Buffers, Held, check_version, leaf_of
from memplug.execute.tape import is_plain, storage_of
from memplug.execute.watch import WriteMode

if TYPE_CHECKING:
    from memplug.execute.region import Region
    from memplug.execute.tokenwise import Executor


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
        self.forwards = self.live = self.unplanned = self.strayed = self.expected_bytes = 0
        self.used_bytes = self.peak_bytes = 0
        self.offloads = self.offloaded_total_bytes = self.prefetched_total_bytes = 0
        self.refused = self.refused_bytes = 0
        self.allocations = self.buffer_bytes = self.buffer_misses = self.largest_frame_bytes = 0
        self.fetched_bytes = self.input_bytes = self.recomputed_bytes = self.waiting = 0

    @property
    def capacity_bytes(self) -> int:
        """Each copy has memory of its own."""
        return self.used_bytes

    def begin_micro_batch(self) -> None:
        """Nothing is prefetched along the order of forwards."""

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
        self.allocations += 1
        return copy.data.to(copy.device, copy=True)

    def reserve(self, nbytes: int) -> bool:
        """Nothing is reserved."""
        return True

    def give_back(self) -> None:
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


class Unobserved:
    """One forward of one region in one autograd graph, and its recompute pass. Nothing but the graph keeps it alive, so
    several can be in flight, in any order, and backward can run more than once.
    """

    def __init__(self, executor: Executor, region: Region, call: Callable[..., Any], args: Any, kwargs: Any):
        self.executor, self.region, self.call = executor, region, call
        self.ambient = Ambient.taken(executor.device, [take() for take in executor.surroundings])
        self.buffers: Buffers | None = None
        self.writes_input = False
        self._holders: list[weakref.ref[Holder] | None] = []
        self._recomputed: dict[int, tuple[torch.Tensor, int]] = {}  # saved tensors and their versions
        self._swapped: set[int] = set()  # addresses of inputs that have a copy, while the forward runs
        flat, self._spec = tree_flatten((args, kwargs))
        self._copies: Copies = executor.transfer
        region.note_given(sum(value.nbytes for value in flat if isinstance(value, torch.Tensor)))
        self._inputs = [self._input(value) if isinstance(value, torch.Tensor) else value for value in flat]
        self._copies.forwards += 1
        self._copies.live += 1

    def __del__(self) -> None:
        if hasattr(self, "_inputs"):
            self._copies.live -= 1

    def _input(self, value: torch.Tensor) -> Copy | Held:
        """Swapped whole where gradients flow through it, else held."""
        swaps = self.region.swaps_input and value.requires_grad and not value.is_leaf
        large = is_plain(type(value)) and value.nbytes >= max(1, self.executor.min_offload_bytes)
        copy = None
        if swaps and large and value.device.type == self.executor.device.kind:
            copy = self._copies.offload(value.detach())
        if copy is None:
            return Held(value)
        self._swapped.add(storage_of(value))
        return copy

    def forward(self, args: Any, kwargs: Any) -> Any:
        """Run the region's forward once. Shapes and values are those of the region's own forward."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        with self.ambient.during_forward(), hooks, WriteMode(self):
            out = self.call(*args, **kwargs)
        self._swapped.clear()
        self.region.native.seen = True
        return out

    def before_write(self, tensor: torch.Tensor) -> None:
        """An operator is about to write to memory that was there before the region."""
        if storage_of(tensor) in self._swapped:
            self.writes_input = True
        elif not self.executor.is_scratch(tensor):
            self._note_foreign_write(tensor)

    def _note_foreign_write(self, tensor: torch.Tensor) -> None:
        """A recompute pass must find its value of now, and leave no trace."""
        held = [item for item in self._inputs if isinstance(item, Held) and _share_memory(item.tensor, tensor)]
        for item in held:
            item.before_write()
        if not held:
            self.buffers = self.buffers or Buffers()
            self.buffers.note(tensor)

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
            try:
                self._restore()
            except torch.OutOfMemoryError as error:
                self.executor.explain("recompute", self.region, error)
                raise
        tensor, version = self._recomputed.pop(holder.index)
        check_version(tensor, version)
        if tensor.shape != holder.size or tensor.dtype != holder.dtype:
            raise RecomputeError(
                f"region {self.region.name}: a saved tensor was {tuple(holder.size)} {holder.dtype} in forward and "
                f"is {tuple(tensor.shape)} {tensor.dtype} when recomputed"
            )
        return tensor

    def _restore(self) -> None:
        executor, region, saves = self.executor, self.region, len(self._holders)
        with executor.standing_around("recompute", region):
            rerun(executor, region, self._call_again, self.ambient, self.buffers, saves, self._is_wanted, self._store)

    def _call_again(self) -> None:
        args, kwargs = tree_unflatten([self._value(item) for item in self._inputs], self._spec)
        self.call(*args, **kwargs)

    def _value(self, item: Any) -> Any:
        if isinstance(item, Copy):
            return leaf_of(self._copies.prefetch(item), True, self.writes_input)
        return leaf_of(item.get(), item.requires_grad, item.written) if isinstance(item, Held) else item

    def _is_wanted(self, index: int) -> bool:
        holder = self._holders[index]
        return holder is not None and holder() is not None

    def _store(self, index: int, tensor: torch.Tensor) -> None:
        self._recomputed[index] = (tensor, tensor._version)


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return is_plain(type(one)) and storage_of(one) == storage_of(other)


def _unpack(packed: Any) -> torch.Tensor:
    if isinstance(packed, Held):
        return packed.get()
    with packed.frame.executor.own:
        return packed.frame.unpack(packed)
