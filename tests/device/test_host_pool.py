"""The pool of pinned memory gives exact sizes without overlaps, keeps to its budget, and merges freed memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memplug.device import host_pool
from memplug.device.device import Device
from memplug.device.host_pool import HostPool
from memplug.sizes import HOST_ROW_BYTES
from memplug.tokenwise.engine.core import core

SLAB_BYTES = 4096


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "SMALLEST_SLAB_BYTES", SLAB_BYTES)


class Pins(Device):
    """A device that lists the buffers registered with the driver, and may refuse to register any."""

    def __init__(self, accepts: bool = True):
        self.accepts = accepts
        self.pinned: list[int] = []

    def pin(self, buffer: torch.Tensor) -> bool:
        if self.accepts:
            self.pinned.append(buffer.data_ptr())
        return self.accepts

    def unpin(self, buffer: torch.Tensor) -> None:
        self.pinned.remove(buffer.data_ptr())


@pytest.mark.parametrize("nbytes", [1, 511, 512, 513, 4095, 4096, 4097, 100_000])
def test_slot_has_the_requested_bytes(nbytes: int) -> None:
    pool = HostPool(Device(), 1 << 20, core())
    slot = pool.rows.take(nbytes)
    assert slot.nbytes == nbytes <= slot.size < nbytes + HOST_ROW_BYTES
    assert slot.offset % HOST_ROW_BYTES == slot.size % HOST_ROW_BYTES == 0
    assert slot.offset + slot.size <= pool.slabs[slot.slab].numel()


def test_freed_memory_is_reused_before_the_pool_grows() -> None:
    pool = HostPool(Device(), 1 << 20, core())
    slots = [pool.rows.take(1024) for _ in range(4)]
    capacity = pool.capacity_bytes
    pool.rows.give(slots[1])
    pool.rows.give(slots[2])
    merged = pool.rows.take(2048)
    assert (merged.slab, merged.offset) == (slots[1].slab, slots[1].offset)
    assert pool.capacity_bytes == capacity


def test_full_pool_gives_no_slot_until_one_is_freed() -> None:
    pool = HostPool(Device(), 3 * SLAB_BYTES, core())
    taken = []
    while (slot := pool.rows.take(1000)) is not None:
        taken.append(slot)
    assert len(taken) == 3 * SLAB_BYTES // 1024
    assert pool.capacity_bytes == pool.budget_bytes == pool.used_bytes
    assert pool.rows.take(1) is None
    pool.rows.give(taken[0])
    assert pool.rows.take(1) is not None


def test_pool_with_zero_budget_gives_no_slot() -> None:
    pool = HostPool(Device(), 0, core())
    assert pool.rows.take(1) is None
    pool.reserve(1000)
    assert pool.capacity_bytes == 0


def test_reserve_allocates_host_memory_before_its_first_use() -> None:
    pool = HostPool(Device(), 1 << 20, core())
    pool.reserve(50_000)
    assert (capacity := pool.capacity_bytes) >= 50_000
    for _ in range(50_000 // 1024):
        pool.rows.take(1024)
    assert pool.capacity_bytes == capacity
    pool.reserve(1 << 30)
    assert pool.capacity_bytes <= 1 << 20


def test_pool_grows_in_smaller_pieces_once_a_plan_reserved_memory() -> None:
    """Reserve for a plan, which knows most of its needs: the swap list's tensors, which come on top, are few."""
    planned, unplanned = (HostPool(Device(), 1 << 24, core()) for _ in range(2))
    planned.reserve(1 << 20)
    taken = [pool.rows.take(1 << 20) for pool in (planned, unplanned)]
    before = planned.capacity_bytes, unplanned.capacity_bytes
    taken += [pool.rows.take(SLAB_BYTES) for pool in (planned, unplanned)]
    assert all(taken)
    assert planned.capacity_bytes == before[0] * 17 // 16 and unplanned.capacity_bytes == before[1] * 3 // 2


def test_closing_the_pool_unregisters_every_slab() -> None:
    device = Pins()
    pool = HostPool(device, 1 << 20, core())
    for _ in range(20):
        pool.rows.take(3000)
    assert len(device.pinned) == len(pool.slabs) > 1
    pool.close()
    assert not device.pinned and pool.capacity_bytes == 0


def test_pool_serves_with_one_warning_if_the_driver_refuses_to_pin(caplog: pytest.LogCaptureFixture) -> None:
    pool = HostPool(Pins(accepts=False), 1 << 20, core())
    slots = [pool.rows.take(3000) for _ in range(20)]
    assert None not in slots and len(pool.slabs) > 1
    assert sum("refused to register" in record.message for record in caplog.records) == 1
    pool.close()


ACTIONS = st.lists(st.one_of(st.integers(1, 6000), st.integers(-1000, -1)), max_size=60)


@settings(max_examples=150, deadline=None)
@given(ACTIONS, st.integers(0, 40_000))
def test_slots_never_overlap_and_freed_memory_merges(actions: list[int], budget_bytes: int) -> None:
    pool = HostPool(Device(), budget_bytes, core())
    alive: list[Any] = []
    for action in actions:  # positive: take so many bytes; negative: give a slot back
        if action > 0:
            slot = pool.rows.take(action)
            if slot is not None:
                alive.append(slot)
        elif alive:
            pool.rows.give(alive.pop(action % len(alive)))
        ranges = sorted((slot.slab, slot.offset, slot.offset + slot.size) for slot in alive)
        pairs = zip(ranges, ranges[1:], strict=False)
        assert all(one != other or end <= begin for (one, _, end), (other, begin, _) in pairs)
        assert pool.capacity_bytes <= budget_bytes
        assert pool.used_bytes == sum(slot.size for slot in alive) <= pool.peak_bytes <= pool.capacity_bytes
    for slot in alive:
        pool.rows.give(slot)
    assert pool.used_bytes == 0
    for slab in list(pool.slabs):  # every slab is one hole again
        assert (pool.rows.take(slab.numel())) is not None
    assert pool.used_bytes == pool.capacity_bytes
