"""Pinned host memory for swapped rows: exact sizes, few slabs, grown on demand up to a budget.

`torch.empty(pin_memory=True)` rounds up to a power of two, and pins only 1.5 to 2 GB/s. A slab here is plain memory
that threads touch in parallel before it is registered with the driver. Slots of any size are cut out of a slab
(memplug/device/native/host_rows.h).
"""

from __future__ import annotations

import logging
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from memplug.device.device import Device
from memplug.errors import coded
from memplug.sizes import GIB, HOST_ROW_BYTES, MIB, rounded_up

log = logging.getLogger("memplug")

SMALLEST_SLAB_BYTES = 64 * MIB
GROWTH = 1 / 2  # growth of the pool, as a share of its size, while no plan says how much it needs
GROWTH_BEYOND_PLAN = 1 / 16  # the same share, once a plan has said how much it needs


class HostPool:
    """First-fit pool over registered slabs.

    Args:
        device: the device whose rows are swapped.
        budget_bytes: upper limit for the sum of all slabs.
        core: the native core.

    Attributes:
        rows: hands out slots of the slabs.
    """

    def __init__(self, device: Device, budget_bytes: int, core: Any):
        self.device = device
        self.budget_bytes = budget_bytes
        pool = weakref.ref(self)
        self.rows = core.HostRows(lambda nbytes: pool()._grow(nbytes))
        self._planned_bytes = 0
        self.slabs: list[torch.Tensor] = []
        self._pinned: list[torch.Tensor] = []
        self._warned = False
        # unpins if the pool is dropped without `close`: a slab freed while registered stays mapped in the driver
        self._finalizer = weakref.finalize(self, _give_back, device, self.slabs, self._pinned)
        self._finalizer.atexit = False  # at exit the driver may be gone already, and its registrations with it

    @property
    def capacity_bytes(self) -> int:
        """Return the bytes of all slabs."""
        return sum(slab.numel() for slab in self.slabs)

    @property
    def used_bytes(self) -> int:
        """Return the bytes of all slots in use."""
        return self.rows.used_bytes

    @property
    def peak_bytes(self) -> int:
        """Return the largest number of bytes in use so far."""
        return self.rows.peak_bytes

    def reserve(self, nbytes: int) -> None:
        """Make room for a plan that needs `nbytes`.

        The pool gets the size that the largest plan since `give_back` needs, within the budget. If no rows are in use,
        one slab of this size replaces all others. Otherwise the slabs stay, and a slab with the missing bytes is added.
        """
        self._planned_bytes = max(self._planned_bytes, nbytes)
        planned = min(
            rounded_up(self._planned_bytes, HOST_ROW_BYTES), self.budget_bytes // HOST_ROW_BYTES * HOST_ROW_BYTES
        )
        if not self.used_bytes and (len(self.slabs) != 1 or self.capacity_bytes != planned):
            self.close()
        if planned > self.capacity_bytes:
            self._add(planned - self.capacity_bytes)

    def give_back(self) -> None:
        """Unpin and free the slabs unless rows are in use; call it when no plan needs host memory."""
        self._planned_bytes = 0
        if not self.used_bytes:
            self.close()

    def take_peak_bytes(self) -> int:
        """Return the largest number of bytes in use since the last call."""
        peak_bytes, self.rows.recent_peak_bytes = self.rows.recent_peak_bytes, self.used_bytes
        return peak_bytes

    def close(self) -> None:
        """Wait for every copy, and return the slabs to the system."""
        _give_back(self.device, self.slabs, self._pinned)
        self.rows.clear()

    def _grow(self, size: int) -> bool:
        capacity = self.capacity_bytes
        room = (self.budget_bytes - capacity) // HOST_ROW_BYTES * HOST_ROW_BYTES
        if size > room:
            return False
        share = GROWTH_BEYOND_PLAN if self._planned_bytes else GROWTH
        return self._add(rounded_up(min(room, max(size, SMALLEST_SLAB_BYTES, int(capacity * share))), HOST_ROW_BYTES))

    def _add(self, nbytes: int) -> bool:
        """Add a slab; return False if the system has no memory for it."""
        capacity = self.capacity_bytes
        try:
            slab = self.device.host_memory(nbytes)
        except MemoryError as error:  # the system has less memory than the budget
            text = (
                "memplug: the host has no memory for another %.2f GiB of swapped rows, so more is recomputed: %s. "
                'Lower "host_budget_gib", or free host memory'
            )
            log.warning(coded("MP017", text), nbytes / GIB, error)
            self.budget_bytes = capacity
            return False
        if self.device.kind == "cuda":
            _touch(slab)
        if self.device.pin(slab):
            self._pinned.append(slab)
        elif not self._warned:
            self._warned = True
            text = (
                "memplug: the driver refused to register host memory, so swapping is slow. Raise the limit on "
                "locked memory (`ulimit -l unlimited`); `memplug doctor` shows it"
            )
            log.warning(coded("MP018", text))
        self.slabs.append(slab)
        self.rows.add(slab)
        return True


def _give_back(device: Device, slabs: list[torch.Tensor], pinned: list[torch.Tensor]) -> None:
    """Unpin the slabs, and empty both lists."""
    if slabs:
        device.synchronize()
    for slab in pinned:
        device.unpin(slab)
    slabs.clear()
    pinned.clear()


def _touch(slab: torch.Tensor) -> None:
    """Fault the pages in with many threads: the driver then registers the slab ten times as fast."""
    workers = min(16, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(torch.Tensor.zero_, slab.chunk(workers)))
