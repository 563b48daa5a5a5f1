"""Clocks, streams and the link; and the simulated allocator."""

from __future__ import annotations

import dataclasses
import functools
import random

import pytest
import torch

from memplug.device.device import device_of
from memplug.predict.virtual import GpuProfile, Rate, VirtualDevice
from memplug.profile.recorder import Recorder
from tests.bench.caching_allocator import CachingAllocator
from tests.support.recording import record
from tests.support.virtual_devices import MIB, SIMPLE, on_device, seconds

# -- time --------------------------------------------------------------------------------------------------------------


def test_kernels_run_in_sequence_for_their_compute_or_memory_time(device: VirtualDevice) -> None:
    left, right = torch.empty(100, 200, device="virtual"), torch.empty(200, 300, device="virtual")
    began = seconds(device)
    product = left @ right
    assert seconds(device) - began == pytest.approx(2 * 100 * 200 * 300 / 1e9, rel=1e-2)
    began = seconds(device)
    product.add_(1)
    product + product
    assert seconds(device) - began == pytest.approx((2 + 3) * 100 * 300 * 4 / 1e9, rel=1e-2)


def test_views_take_no_time_and_share_memory(device: VirtualDevice) -> None:
    x = torch.empty(4, 6, device="virtual")
    began, used = seconds(device), device.usage().allocated
    views = [x.t(), x[1:], x.view(2, 12), x.unsqueeze(0).expand(3, 4, 6), x.chunk(2)[1], x.reshape(24), x.detach()]
    views += [
        x.expand(3, 4, 6).transpose(1, 2).reshape(3, 3, 2, 4),
        x.unfold(0, 2, 1),
        torch.view_as_complex(x.view(4, 3, 2)),
    ]
    assert seconds(device) == began and device.usage().allocated == used
    assert all(view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for view in views)


def test_streams_run_concurrently_and_wait_by_events(device: VirtualDevice) -> None:
    side = torch.Stream("virtual")
    x, y = on_device(MIB), torch.empty(MIB, dtype=torch.uint8)
    began = seconds(device)
    with side:
        y.copy_(x, non_blocking=True)  # 1.05 s
        copied = side.record_event(torch.Event("virtual", enable_timing=True))
    begin = torch.Event("virtual", enable_timing=True)
    begin.record()
    x.add_(1)
    assert not copied.query() and begin.query()
    torch.accelerator.current_stream().wait_event(copied)
    end = torch.Event("virtual", enable_timing=True)
    end.record()
    assert seconds(device) - began == pytest.approx(MIB / 1e6, rel=1e-3)
    assert begin.elapsed_time(end) / 1e3 == pytest.approx(MIB / 1e6, rel=1e-3) and copied.query()


def test_each_link_direction_carries_one_copy_at_a_time(device: VirtualDevice) -> None:
    x, y = on_device(MIB), torch.empty(MIB, dtype=torch.uint8)
    began = seconds(device)
    for to_host in (True, True, False):
        with torch.Stream("virtual"):
            (y if to_host else x).copy_(x if to_host else y, non_blocking=True)
    assert seconds(device) - began == pytest.approx(2 * MIB / 1e6, rel=1e-3)
    began = seconds(device)
    x.copy_(y)
    assert torch.accelerator.current_stream().query(), "the host has waited"
    assert seconds(device) - began == pytest.approx(MIB / 2e6, rel=1e-3)


# Each direction is half as fast while the other one is busy.
SHARED = dataclasses.replace(
    SIMPLE, to_host_both_bytes_per_s=Rate.always(0.5e6), to_device_both_bytes_per_s=Rate.always(1e6)
)


def _copy(to_host: bool, nbytes: int) -> torch.Event:
    """Copy on a stream of its own, and return an event of its end."""
    ends = (torch.empty(nbytes, dtype=torch.uint8), on_device(nbytes))
    with torch.Stream("virtual") as stream:
        ends[not to_host].copy_(ends[to_host], non_blocking=True)
        return stream.record_event(torch.Event("virtual", enable_timing=True))


def _ends_s(device: VirtualDevice, *copies: tuple[bool, int]) -> list[float]:
    """Queue copies in this order, and return the seconds at which each ends."""
    device.synchronize()
    begin, ends = device.stamp(), [_copy(*each) for each in copies]
    device.synchronize()
    return [device.seconds_between(begin, end) for end in ends]


def test_copy_is_slower_while_the_other_direction_is_busy(device: VirtualDevice) -> None:
    device = VirtualDevice(SHARED)
    assert _ends_s(device, (True, MIB)) == [pytest.approx(MIB / 1e6, rel=1e-3)]
    short_s = 0.25 * MIB / 2e6
    _, end_s = _ends_s(device, (False, MIB // 4), (True, MIB))
    # The short copy slows down too, to twice its time, although its end was fixed before the long copy was queued.
    assert end_s == pytest.approx(MIB / 1e6 + 2 * short_s / 2, rel=1e-3)


def test_slowdown_by_a_later_opposite_copy_is_charged_to_the_next_copy(device: VirtualDevice) -> None:
    device = VirtualDevice(SHARED)
    first_s, other_s, next_s = _ends_s(device, (True, MIB), (False, MIB), (True, MIB))
    assert first_s == pytest.approx(MIB / 1e6, rel=1e-3), "its end was already fixed"
    assert other_s == pytest.approx(MIB / 1e6, rel=1e-3), "it overlapped the first copy all the time"
    assert next_s == pytest.approx(2 * MIB / 1e6 + other_s / 2, rel=1e-3)


def _flowing_ends_s(queues: list[list[float]]) -> list[float]:
    """Return the seconds at which two queues of copies end, if each runs at half its rate while the other one copies.

    Args:
        queues: For each queue, the seconds that each of its copies takes alone.
    """
    alone = [sum(queue) for queue in queues]
    both_s = 2 * min(alone)
    return [both_s + each - min(alone) for each in alone]


@pytest.mark.parametrize("seed", range(8))
def test_queues_in_both_directions_end_as_if_rates_changed_instantly(device: VirtualDevice, seed: int) -> None:
    chance, device = random.Random(seed), VirtualDevice(SHARED)
    copies = [(chance.random() < 0.5, chance.randrange(MIB // 8, MIB)) for _ in range(20)]
    alone = [[nbytes / (1e6 if each else 2e6) for to_host, nbytes in copies if to_host == each] for each in (1, 0)]
    *_, to_host_s, to_device_s = _ends_s(device, *copies, (True, 1), (False, 1))
    assert [to_host_s, to_device_s] == pytest.approx(_flowing_ends_s(alone), rel=1e-3)


def test_planning_uses_the_link_rates_with_both_directions_busy(device: VirtualDevice) -> None:
    VirtualDevice(SHARED)
    assert VirtualDevice.current().link_rates() == (0.5e6, 1e6)


def test_planning_uses_the_link_rates_of_the_current_hardware(device: VirtualDevice) -> None:
    found = []
    for factor in (1, 3):
        faster = Rate.always(factor * 1e6)
        VirtualDevice(dataclasses.replace(SIMPLE, to_host_both_bytes_per_s=faster))
        found.append(device_of(torch.device("virtual", 0)).link_rates()[0])
    assert found == [1e6, 3e6]


def test_spans_have_name_and_time_of_each_kernel_and_copy(device: VirtualDevice) -> None:
    x = on_device(MIB)
    device.keep_spans(True)
    x.add_(1)
    x.cpu()
    device.keep_spans(False)
    x.add_(1)
    first, second = device.take_spans()
    assert (first.name, second.name) == ("aten::add_", "to host") and first.end_s <= second.begin_s
    assert second.end_s - second.begin_s == pytest.approx(MIB / 1e6, rel=1e-3)
    assert device.take_spans() == []


# -- memory ------------------------------------------------------------------------------------------------------------


def test_request_beyond_device_memory_raises_out_of_memory(device: VirtualDevice) -> None:
    small = VirtualDevice(GpuProfile(**{**vars(SIMPLE), "memory_bytes": device.usage().reserved + 40 * MIB}))
    kept = on_device(30 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 20971520 bytes"):
        on_device(20 * MIB)
    del kept
    assert small.usage().retries == 0
    assert on_device(36 * MIB).numel() == 36 * MIB and small.usage().retries == 1, "free segments were released"


@pytest.mark.parametrize("expandable", [False, True])
def test_device_memory_matches_the_simulated_allocator(device: VirtualDevice, expandable: bool) -> None:
    chance, simulated = random.Random(0), CachingAllocator(expandable=expandable)
    device = VirtualDevice(SIMPLE, expandable_segments=expandable)
    device.empty_cache()
    before = device.usage()
    live: list[tuple[torch.Tensor, object]] = []
    for _ in range(3000):
        if live and chance.random() < 0.5:
            tensor, handle = live.pop(chance.randrange(len(live)))
            del tensor
            simulated.free(handle)
        else:
            nbytes = int(10 ** chance.uniform(1, 7.8))
            live.append((on_device(nbytes), simulated.malloc(nbytes)))
        now = device.usage()
        assert now.allocated - before.allocated == simulated.allocated_bytes
    assert now.reserved - before.reserved == simulated.reserved_bytes


def test_freed_pages_of_expandable_segments_are_remapped() -> None:
    device = VirtualDevice(SIMPLE, expandable_segments=True)
    device.empty_cache()
    there = device.usage().reserved
    VirtualDevice(GpuProfile(**{**vars(SIMPLE), "memory_bytes": there + 100 * MIB}), expandable_segments=True)
    kept = [on_device(20 * MIB) for _ in range(5)]
    del kept[1], kept[2]  # 20 MiB each, with 20 MiB in use in between
    apart = on_device(40 * MIB)
    assert device.usage().reserved == there + 100 * MIB and device.usage().retries > 0
    with pytest.raises(torch.OutOfMemoryError):
        on_device(MIB)
    del apart, kept
    assert on_device(100 * MIB).numel() == 100 * MIB


def test_request_waits_for_blocks_that_a_stream_uses_if_memory_is_short(device: VirtualDevice) -> None:
    there = device.usage().reserved
    VirtualDevice(GpuProfile(**{**vars(SIMPLE), "memory_bytes": there + 40 * MIB}))
    used, side = on_device(30 * MIB), torch.Stream("virtual")
    with side:
        torch.empty(30 * MIB, dtype=torch.uint8).copy_(used, non_blocking=True)
    used.record_stream(side)
    del used
    before_s = device.now_s()
    assert on_device(32 * MIB).numel() == 32 * MIB and device.now_s() > before_s


def test_block_used_by_another_stream_is_not_reused_before_it_is_done(device: VirtualDevice) -> None:
    used, side = on_device(MIB * 3), torch.Stream("virtual")
    address = used.data_ptr()
    with side:
        torch.empty(MIB * 3, dtype=torch.uint8).copy_(used, non_blocking=True)
    used.record_stream(side)
    del used
    assert on_device(MIB * 3).data_ptr() != address
    device.synchronize()
    assert on_device(MIB * 3).data_ptr() == address


@pytest.mark.parametrize("expandable", [False, True])
def test_holes_are_free_bytes_of_partly_used_segments(device: VirtualDevice, expandable: bool) -> None:
    device = VirtualDevice(SIMPLE, expandable_segments=expandable)
    lasting, freed = on_device(4 * MIB), on_device(4 * MIB)
    assert device.usage().holes == 12 * MIB, "of a segment or page of 20 MiB"
    del freed
    assert device.usage().holes == 16 * MIB
    large = on_device(64 * MIB)
    del large
    assert device.usage().holes == 16 * MIB, "a wholly free segment can be released"
    del lasting
    assert device.usage().holes == 0


# -- restarts ----------------------------------------------------------------------------------------------------------


def test_restarted_device_repeats_a_program_exactly(device: VirtualDevice) -> None:
    def run() -> tuple[object, ...]:
        device.restart()
        kept = [on_device(30 * MIB), on_device(MIB)]
        kept[0].add_(1)
        kept[1].cpu()
        taken = seconds(device), device.flops(), device.usage().reserved_peak, [each.data_ptr() for each in kept]
        del kept
        on_device(3 * MIB)
        return taken

    first = run()
    assert all(run() == first for _ in range(3))


def test_addresses_do_not_run_out_after_many_restarts(device: VirtualDevice) -> None:
    large = VirtualDevice(SIMPLE, bounded=False)
    for size in range(1, 20):
        large.restart()
        assert on_device((4 << 40) + size * 20 * MIB).data_ptr()


def test_events_and_tensors_from_before_a_restart_stay_usable(device: VirtualDevice) -> None:
    kept, side = on_device(40 * MIB), torch.Stream("virtual")
    with side:
        torch.empty(40 * MIB, dtype=torch.uint8).copy_(kept, non_blocking=True)
    copied = side.record_event()
    assert not copied.query()
    device.restart()
    assert seconds(device) == 0 and copied.query()
    torch.accelerator.current_stream().wait_event(copied)
    assert seconds(device) == 0
    other = on_device(40 * MIB)
    assert other.data_ptr() != kept.data_ptr() and device.usage().allocated == 80 * MIB


def test_streams_keep_their_numbers_from_one_recording_to_the_next(device: VirtualDevice) -> None:
    recorder, main, side = Recorder("virtual"), torch.accelerator.current_stream(), torch.Stream("virtual")

    def step(order: tuple[torch.Stream, ...]) -> None:
        for stream in order:
            with stream:
                on_device(MIB)

    try:
        orders = (main, side), (side, main), (side,)
        found = [record(recorder, functools.partial(step, order)).requests["stream"].tolist() for order in orders]
        assert found == [[0, 1], [1, 0], [1]]
    finally:
        recorder.stop()
