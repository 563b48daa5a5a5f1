"""Copies that run late, early or in odd order never change a gradient, and every wait of the executor is needed.

The scenario forces each race that an offloader can lose: a first step on fresh host memory, later steps with other
data on reused host memory, two graphs in flight, a second backward through one graph, an operator that writes in
place to a tensor whose copy out is under way, and a graph that is dropped while copies in are under way.
"""

from __future__ import annotations

import pytest
import torch

from memplug.profile.trace import Pass
from tests.support.blocks import Block, Stack, assert_same, gradients, tokenwise, twin
from tests.support.extension import Wait
from tests.support.schedules import Schedule, order
from tests.support.simulated import Adversary, adversarial_device

pytestmark = pytest.mark.device

SCHEDULES = ["late", "early"]
# tests/cudasim/test_regions_on_streams.py tests USE_FOR_COMPUTE: the wait for another stream of the user's
WAITS = [wait for wait in Wait if wait is not Wait.USE_FOR_COMPUTE]
BUFFERS = {"new memory": 0, "rounding buffers": 1 << 20}
buffered = pytest.mark.parametrize("buffer_bytes", BUFFERS.values(), ids=BUFFERS)


class Stop(Exception):
    """An error in the middle of backward."""


def scenario(device: Adversary, alpha: float, in_place: bool = False, seed: int = 0, *, buffer_bytes: int = 0) -> None:
    """Train a few steps that force all of these races.

    Raise AssertionError if a gradient differs, a copy touches released memory, or ordinary steps miss rounding buffers
    that are large enough.
    """
    torch.manual_seed(seed)
    model = Stack(5, lambda: Block(in_place=in_place))
    reference = twin(model)
    executor = tokenwise(model, alpha, device)
    data = torch.randn(9, 2, 6, 16)
    with device:
        executor.flow.reserve(buffer_bytes)
        for x in data[:2]:  # ordinary steps
            model(x).backward()
            reference(x).backward()
            assert_same(gradients(model), gradients(reference), exact=alpha in (0, 1))
        (model(data[2]) + model(data[3])).backward()  # two graphs in flight, one backward
        (reference(data[2]) + reference(data[3])).backward()
        assert_same(gradients(model), gradients(reference), exact=alpha in (0, 1))
        first, second = model(data[4]), model(data[5])  # two graphs in flight, backward of the older one first
        first.backward(retain_graph=True)
        second.backward()
        first.backward()
        reference_first = reference(data[4])
        reference_first.backward(retain_graph=True)
        reference(data[5]).backward()
        reference_first.backward()
        assert_same(gradients(model), gradients(reference), exact=False)
        loss = model(data[6])
        handle = model.layers[3].up.weight.register_hook(_stop)
        with pytest.raises(Stop):  # some tensors are prefetched, but never used
            loss.backward()
        handle.remove()
        del loss
        model.zero_grad()
        misses = executor.transfer.buffer_misses
        for x in data[7:]:
            model(x).backward()
            reference(x).backward()
            assert_same(gradients(model), gradients(reference), exact=alpha in (0, 1))
        executor.transfer.drain()
    device.synchronize()
    assert not device.violations, device.violations
    assert executor.transfer.buffer_misses == misses
    assert (
        executor.pool.used_bytes == 0
        and executor.transfer.prefetched_bytes == 0
        and executor.flow.recomputed_bytes == 0
    )


def _stop(gradient: torch.Tensor) -> None:
    raise Stop


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("in_place", [False, True])
@buffered
def test_gradients_hold_with_late_and_early_copies(
    schedule: str, alpha: float, in_place: bool, buffer_bytes: int
) -> None:
    scenario(adversarial_device(schedule), alpha, in_place, buffer_bytes=buffer_bytes)


@pytest.mark.parametrize(
    "seeds",
    [range(8), *(pytest.param(range(first, first + 25), marks=pytest.mark.long) for first in range(0, 200, 25))],
    ids=str,
)
def test_gradients_hold_on_200_random_schedules(seeds: range) -> None:
    for seed in seeds:
        device, buffer_bytes = adversarial_device("random", seed), [*BUFFERS.values()][seed // 4 % len(BUFFERS)]
        scenario(device, (0.4, 1.0)[seed % 2], in_place=seed % 4 > 1, seed=seed, buffer_bytes=buffer_bytes)


@pytest.mark.unordered
@pytest.mark.parametrize("missing", WAITS, ids=lambda wait: wait.name.lower())
@buffered
def test_missing_wait_is_detected(missing: Wait, buffer_bytes: int) -> None:
    cases = [(schedule, in_place) for schedule in SCHEDULES for in_place in (False, True)]
    devices = ((adversarial_device(schedule, missing=missing), in_place) for schedule, in_place in cases)
    assert any(_fails(device, in_place, buffer_bytes) for device, in_place in devices)


@pytest.mark.unordered
@pytest.mark.long
@pytest.mark.parametrize("missing", WAITS, ids=lambda wait: wait.name.lower())
def test_missing_wait_is_detected_on_many_of_200_random_schedules(missing: Wait) -> None:
    """Use the schedules of `test_gradients_hold_on_200_random_schedules`, which leaves out no wait."""
    noticed, enough = 0, 20
    for seed in range(200):
        device = adversarial_device("random", seed, missing)
        noticed += _fails(device, seed % 4 > 1, BUFFERS["rounding buffers"] if seed % 8 > 3 else 0, seed)
        if noticed == enough:
            return
    pytest.fail(f"only {noticed} schedules notice it")


def _fails(device: Adversary, in_place: bool, buffer_bytes: int, seed: int = 0) -> bool:
    try:
        scenario(device, 0.4, in_place, seed, buffer_bytes=buffer_bytes)
    except (AssertionError, RuntimeError, IndexError):
        return device.asked_for(device.missing) > 0
    return False


def pipeline(device: Adversary, alpha: float, schedule: Schedule, seed: int = 0, *, in_place: bool = False) -> None:
    """Run one pipeline stage in the schedule's order.

    Raise AssertionError if a gradient differs or a copy touches released memory.
    """
    torch.manual_seed(seed)
    model = Stack(schedule.chunks * schedule.layers, lambda: Block(in_place=in_place))
    reference = twin(model)
    executor = tokenwise(model, alpha, device)
    with device:
        for _ in range(3):
            inputs = torch.randn(schedule.micro_batches, schedule.chunks, 2, 6, 16)
            outer = torch.randn(schedule.micro_batches, schedule.chunks, 2, 6, 16)
            for network in (model, reference):
                outputs: dict[tuple[int, int], torch.Tensor] = {}
                for action, micro_batch, chunk in order(schedule):
                    key = micro_batch, chunk
                    if action is Pass.BACKWARD:
                        outputs.pop(key).backward(outer[key])
                        continue
                    executor.flow.begin_micro_batch()
                    x = inputs[key].clone().requires_grad_()  # received from another stage
                    x = x * 1.0 if schedule.stage == chunk == 0 else x
                    for layer in network.layers[chunk * schedule.layers : (chunk + 1) * schedule.layers]:
                        x = layer(x)
                    outputs[key] = x
            assert_same(gradients(model), gradients(reference), exact=alpha in (0, 1))
            executor.flow.end_step([region.native for region in model.regions])
    device.synchronize()
    assert not device.violations, device.violations
    assert (
        executor.pool.used_bytes == 0
        and executor.transfer.prefetched_bytes == 0
        and executor.flow.recomputed_bytes == 0
    )
    follows = schedule.stage == schedule.stages - 1  # a micro-batch's backward directly follows its forward
    assert model.regions[-1].native.offloads_late == follows and not model.regions[0].native.offloads_late


PIPELINES = {
    "1F1B, first stage": Schedule(source="", layers=3, micro_batches=5, stages=3, stage=0),
    "1F1B, last stage": Schedule(source="", layers=3, micro_batches=5, stages=3, stage=2),
    "interleaved, first stage": Schedule(source="", layers=2, micro_batches=4, stages=2, stage=0, chunks=2),
    "interleaved, last stage": Schedule(source="", layers=2, micro_batches=4, stages=2, stage=1, chunks=2),
}


@pytest.mark.parametrize(
    ("alpha", "seeds"),
    [(0.4, 0), *(pytest.param(alpha, 5, marks=pytest.mark.long) for alpha in (0.0, 0.4, 1.0))],
)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", PIPELINES)
def test_gradients_hold_in_every_pipeline_schedule(name: str, in_place: bool, alpha: float, seeds: int) -> None:
    for schedule in SCHEDULES:
        pipeline(adversarial_device(schedule), alpha, PIPELINES[name], in_place=in_place)
    for seed in range(seeds):
        pipeline(adversarial_device("random", seed), alpha, PIPELINES[name], seed, in_place=in_place)
