"""Without the arena, swapped tensors are prefetched into device memory that is reserved once (MEMO, section 4.1).

A prefetch allocates nothing, and never overwrites a tensor that is still held.
"""

from __future__ import annotations

import logging

import pytest
import torch

from memplug.tokenwise.budgets import DeviceBudget
from memplug.tokenwise.engine.core import core
from memplug.tokenwise.rounding import Rounding
from tests.support.blocks import Stack, assert_clean, assert_same, gradients, tokenwise, train_stacks
from tests.support.rounding import ENOUGH_BYTES, Shows, Watched, pair
from tests.support.simulated import ScriptedDevice

# -- nothing is allocated ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["late", "early"])
def test_prefetches_allocate_no_device_memory_besides_the_buffers(schedule: str) -> None:
    model, reference = pair()
    device = Watched(schedule)
    executor = tokenwise(model, 1.0, device)
    with device:
        executor.flow.reserve(ENOUGH_BYTES)
        for seed in range(3):
            train_stacks(model, reference, seed)
        assert [nbytes for _, nbytes, _ in device.made] == [ENOUGH_BYTES] * 2
        assert executor.transfer.allocations == 0 < executor.transfer.prefetched_total_bytes
        assert_clean(executor)
    device.synchronize()
    assert not device.violations


# -- in turn ----------------------------------------------------------------------------------------------------------


def test_regions_take_the_buffers_in_turn() -> None:
    model, reference = pair(layers=7)
    device = Watched()
    executor = tokenwise(model, 1.0, device)
    with device:
        executor.flow.reserve(ENOUGH_BYTES)
        train_stacks(model, reference, 0)
        assert device.buffers_used() == [1, 0] * 3, "layers 5 to 0 in turn; the last layer is still resident"
        device.synchronize()


def test_buffers_let_prefetches_run_one_region_ahead() -> None:
    """Prefetch the tensors of the next layer in backward while one layer's backward runs, as in MEMO."""
    limited, buffered = (_copies_begun(nbytes) for nbytes in (0, ENOUGH_BYTES))
    assert buffered[-1] == limited[-1] and all(more >= few for more, few in zip(buffered, limited, strict=True))
    assert buffered[2] > limited[2]


def _copies_begun(buffer_bytes: int) -> list[int]:
    """Return the number of prefetches queued when each layer's backward began."""
    model, _ = pair(6, Shows)
    device = Watched()
    executor = tokenwise(model, 1.0, device)
    begun: list[int] = []
    with device:
        executor.flow.reserve(buffer_bytes)
        for layer in model.layers:
            layer.down.bias.register_hook(lambda _: begun.append(len(device.copied_to)))
        loss = model(torch.randn(2, 6, 16))
        device.copied_to.clear()
        loss.backward()
    return begun


def test_forward_keeps_as_many_regions_resident_as_there_are_buffers() -> None:
    resident = []
    for buffers in (2, 3, 4):
        model, _ = pair(layers=40)  # so many layers that the limit on held bytes allows four resident regions
        executor = tokenwise(model, 0.0, buffers=buffers)
        loss = model(torch.randn(2, 6, 16))
        resident.append(executor.transfer.resident_bytes)
        del loss
        assert_clean(executor)
    one = resident[1] - resident[0]
    assert one > 0 and resident == [2 * one, 3 * one, 4 * one]


# -- tensors that are still held --------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["late", "early"])
def test_tensor_held_after_its_backward_is_never_overwritten(schedule: str) -> None:
    model, reference = pair(6, Shows)
    device = Watched(schedule)
    executor = tokenwise(model, 1.0, device)
    layers = [*model.layers[:2], *reference.layers[:2]]  # backward ends with these two, which use different buffers
    with device:
        executor.flow.reserve(ENOUGH_BYTES)
        for layer in layers:
            layer.keeps = True
        train_stacks(model, reference, 0)
        assert executor.opaque_regions == executor.transfer.buffer_misses == 0
        for layer in layers:
            layer.keeps = False
        for seed in range(1, 4):
            train_stacks(model, reference, seed)
        assert executor.transfer.buffer_misses == executor.transfer.allocations > 0
        for layer, other in zip(layers[:2], layers[2:], strict=True):
            assert torch.equal(layer.shown, other.shown)
        misses = executor.transfer.buffer_misses
        for layer in layers:
            layer.shown = torch.empty(0)
        train_stacks(model, reference, 9)
        assert executor.transfer.buffer_misses == misses, "the buffers are free again"
    device.synchronize()
    assert not device.violations


def test_tensor_in_a_buffer_outlives_the_close_of_the_executor() -> None:
    model, reference = pair(6, Shows)
    device = Watched()
    executor = tokenwise(model, 1.0, device)
    with device:
        executor.flow.reserve(ENOUGH_BYTES)
        for layer in (model.layers[0], reference.layers[0]):
            layer.keeps = True
        train_stacks(model, reference, 0)
        (_, _, first), (_, _, second) = device.made
        assert first.get() is not None and second.get() is not None
        executor.close()
        alive = [buffer.get() is not None for buffer in (first, second)]
        assert sorted(alive) == [False, True] and executor.transfer.buffer_bytes == 0
        assert torch.equal(model.layers[0].shown, reference.layers[0].shown)
        model.layers[0].shown = torch.empty(0)
        assert first.get() is None and second.get() is None


# -- tensors that do not fit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["late", "early"])
@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_nested_backward_does_not_use_the_buffers_of_the_outer_one(schedule: str, alpha: float) -> None:
    model, reference = pair()
    device = Watched(schedule)
    executor = tokenwise(model, alpha, device)
    data = torch.randn(4, 2, 6, 16)
    with device:
        executor.flow.reserve(ENOUGH_BYTES)
        for network in (model, reference):
            inner = [network(x) for x in data[1:]]
            hook = network.layers[3].up.weight.register_hook(lambda _, inner=inner: _backward(inner))
            network(data[0]).backward()
            hook.remove()
            assert not inner
        assert_same(gradients(model), gradients(reference), exact=alpha in (0, 1))
        misses = executor.transfer.buffer_misses
        assert misses == executor.transfer.allocations > 0
        for network in (model, reference):
            loss = network(data[0])
            for turn in range(3):
                loss.backward(retain_graph=turn < 2)
            del loss
        assert_same(gradients(model), gradients(reference), exact=False)
        assert executor.transfer.buffer_misses == misses, "repeated backward through one graph reuses its buffers"
        assert_clean(executor)
    device.synchronize()
    assert not device.violations


def _backward(losses: list[torch.Tensor]) -> None:
    if losses:
        losses.pop().backward()


@pytest.mark.parametrize("nbytes", [1, 1000, 4000])
def test_tensors_too_large_for_their_buffer_are_still_restored(nbytes: int) -> None:
    model, reference = pair()
    device = Watched()
    executor = tokenwise(model, 1.0, device)
    with device:
        executor.flow.reserve(nbytes)
        train_stacks(model, reference, 0)
        assert 2 * nbytes <= executor.transfer.buffer_bytes < 2 * executor.flow.largest_frame_bytes
        assert executor.transfer.buffer_misses == executor.transfer.allocations > 0
        assert (executor.transfer.prefetched_total_bytes > 0) and len(device.buffers_used()) > 2 * (nbytes > 1)
        assert_clean(executor)
    device.synchronize()
    assert not device.violations


def test_buffers_of_one_stream_are_not_used_on_another() -> None:
    """Regions on a second stream would overwrite tensors that the first stream still reads."""

    class TwoStreams(ScriptedDevice):
        now = "first"

        def compute_stream(self) -> str:
            return self.now

    device, model = TwoStreams(), Stack(4)
    executor = tokenwise(model, 1.0, device)
    executor.flow.reserve(ENOUGH_BYTES)
    model(torch.randn(2, 6, 16)).backward()
    assert executor.transfer.allocations == 0
    device.now = "second"
    model(torch.randn(2, 6, 16)).backward()
    assert executor.transfer.buffer_misses == executor.transfer.allocations > 0


@pytest.mark.parametrize("room_bytes", [0, ENOUGH_BYTES])
def test_lack_of_room_for_rounding_buffers_warns_once(room_bytes: int, caplog: pytest.LogCaptureFixture) -> None:
    model, reference = pair()
    device = Watched(room_bytes=ENOUGH_BYTES)
    executor = tokenwise(model, 1.0, device)
    rounding = Rounding(DeviceBudget(device), executor, planned=False)
    with device:
        for seed, frame_bytes in enumerate((room_bytes, 2 * ENOUGH_BYTES, 3 * ENOUGH_BYTES)):
            executor.flow.largest_frame_bytes = frame_bytes
            rounding.end_step(None, stable=True)
            assert executor.transfer.buffer_bytes == (2 * room_bytes if seed == 0 else 0)
            train_stacks(model, reference, seed)
    assert [record.levelno for record in caplog.records if "rounding buffers" in record.message] == [logging.WARNING]


def test_storage_of_a_restored_tensor_has_the_size_of_the_tensor() -> None:
    """With a larger storage, accounting would count the whole buffer, and copies of the storage would include it."""
    device = ScriptedDevice()
    known = core()
    pool = known.HostRows(lambda nbytes: False)
    pool.add(torch.empty(1 << 16, dtype=torch.uint8))
    transfer = known.Transfer(device.streams(known), pool)
    assert transfer.reserve(2, 4096)
    tensors = [torch.randn(4, 8), torch.randn(3, 5).t(), torch.randn(7).to(torch.bfloat16)]
    parts = [transfer.offload(each, each.size(0)) for each in tensors]
    transfer.release(parts)
    found = [transfer.acquire(part)[0] for part in parts]
    assert all(torch.equal(one, other) for one, other in zip(found, tensors, strict=True))
    assert [one.stride() for one in found] == [other.stride() for other in tensors]
    assert [one.untyped_storage().nbytes() for one in found] == [other.nbytes for other in tensors]
    starts = [one.data_ptr() for one in found]
    assert [start - starts[0] for start in starts] == [0, 512, 1024]
    assert transfer.allocations == 0
