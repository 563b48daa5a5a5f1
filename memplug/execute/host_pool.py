"""Pinned host memory for swapped rows: exact sizes, few slabs, grown on demand up to a budget.

`torch.empty(pin_memory=True)` rounds up to a power of two and allocates 1.5-2 GB/s. Here a slab is plain memory that
threads touch in parallel before it is registered with the driver; rows of any size are cut out of it first-fit, and
neighbours merge when they are given back, so that a run with many sequence lengths does not grow without bound
(ProTrain, appendix B.2).
"""

from __future__ import annotations

import bisect
import logging
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from memplug.execute.device import Device

log = logging.getLogger("memplug")

ALIGNMENT_BYTES = 512
SMALLEST_SLAB_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Slot:
    """Bytes `[offset, offset + size)` of one slab; `data` is the view of them (1-D uint8, `nbytes` as asked)."""

    slab: int
    offset: int
    size: int
    data: torch.Tensor


class HostPool:
    """First-fit pool over registered slabs.

    Args:
        device: registers the slabs.
        budget_bytes: the sum of slabs never exceeds this.
    """

    def __init__(self, device: Device, budget_bytes: int):
        self.device = device
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self._recent_peak_bytes = 0
        self._planned_bytes = 0
        self.slabs: list[torch.Tensor] = []
        self._free: list[list[tuple[int, int]]] = []  # per slab: sorted (offset, size)
        self._pinned: list[bool] = []
        self._warned = False
        # where it is dropped without having been closed: memory that is freed while it is registered stays mapped
        self._finalizer = weakref.finalize(self, _give_back, device, self.slabs, self._pinned)
        self._finalizer.atexit = False  # the driver may be gone by then, and what it knows goes with it

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.numel() for slab in self.slabs)

    def take(self, nbytes: int) -> Slot | None:
        """Host memory for `nbytes` bytes, or None when the budget has no room left for it."""
        size = _aligned(nbytes)
        found = self._find(size)
        if found is None and self._grow(size):
            found = self._find(size)
        if found is None:
            return None
        slab, position = found
        offset, free = self._free[slab][position]
        if free == size:
            del self._free[slab][position]
        else:
            self._free[slab][position] = (offset + size, free - size)
        self.used_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        self._recent_peak_bytes = max(self._recent_peak_bytes, self.used_bytes)
        return Slot(slab, offset, size, self.slabs[slab][offset : offset + nbytes])

    def give(self, slot: Slot) -> None:
        """Take a slot back. The caller has ordered every copy of it before the next use of the pool."""
        free = self._free[slot.slab]
        position = bisect.bisect_left(free, (slot.offset, 0))
        start, end = slot.offset, slot.offset + slot.size
        if position < len(free) and free[position][0] == end:
            end += free[position][1]
            del free[position]
        if position > 0 and sum(free[position - 1]) == start:
            start = free[position - 1][0]
            position -= 1
            del free[position]
        free.insert(position, (start, end - start))
        self.used_bytes -= slot.size

    def reserve(self, nbytes: int) -> None:
        """A plan needs `nbytes`: have one slab of the most that any plan so far needed, within the budget, and no
        other. Where rows are in use the slabs stay, and one of what is missing is added.
        """
        self._planned_bytes = max(self._planned_bytes, nbytes)
        planned = min(_aligned(self._planned_bytes), self.budget_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
        if not self.used_bytes and (len(self.slabs) != 1 or self.capacity_bytes != planned):
            self._clear()
        if planned > self.capacity_bytes:
            self._add(planned - self.capacity_bytes)

    def take_peak_bytes(self) -> int:
        """The most that was in use since the last call."""
        peak_bytes, self._recent_peak_bytes = self._recent_peak_bytes, self.used_bytes
        return peak_bytes

    def close(self) -> None:
        """Wait for every copy, and give the slabs back to the system."""
        self._clear()
        self.used_bytes = 0

    def _clear(self) -> None:
        _give_back(self.device, self.slabs, self._pinned)
        self._free.clear()

    def _find(self, size: int) -> tuple[int, int] | None:
        for slab, holes in enumerate(self._free):
            for position, (_, free) in enumerate(holes):
                if free >= size:
                    return slab, position
        return None

    def _grow(self, size: int) -> bool:
        capacity = self.capacity_bytes
        room = (self.budget_bytes - capacity) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        if size > room:
            return False
        return self._add(_aligned(min(room, max(size, SMALLEST_SLAB_BYTES, capacity // 2))))

    def _add(self, nbytes: int) -> bool:
        """One slab more."""
        capacity = self.capacity_bytes
        try:
            slab = torch.empty(nbytes, dtype=torch.uint8)
        except RuntimeError as error:  # the system has less than the budget promised
            log.warning("memplug: no host memory for another %.2f GiB: %s", nbytes / 2**30, error)
            self.budget_bytes = capacity
            return False
        if self.device.kind == "cuda":
            _touch(slab)
        pinned = self.device.pin(slab)
        if not pinned and not self._warned:
            self._warned = True
            log.warning(
                "memplug: the driver refused to register host memory (see `memplug doctor`, memlock); "
                "swapping will be slow"
            )
        self.slabs.append(slab)
        self._free.append([(0, nbytes)])
        self._pinned.append(pinned)
        return True


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _give_back(device: Device, slabs: list[torch.Tensor], pinned: list[bool]) -> None:
    """Empties both lists."""
    if slabs:
        device.synchronize()
    for slab, registered in zip(slabs, pinned, strict=True):
        if registered:
            device.unpin(slab)
    slabs.clear()
    pinned.clear()


def _touch(slab: torch.Tensor) -> None:
    """Fault the pages in with many threads: registering touched memory is an order faster than letting the driver
    touch it.
    """
    workers = min(16, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(torch.Tensor.zero_, slab.chunk(workers)))
