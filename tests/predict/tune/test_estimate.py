"""Predictions of a model that is small enough to count by hand, and bounds of boxes of configurations."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplug.predict.tune import protrain
from memplug.predict.tune.estimate import StepEstimator, chunks_of
from memplug.predict.tune.fixed import all_layouts
from memplug.predict.tune.search import Box, MemoryLimits, StepLayout, search
from memplug.predict.tune.space import free_box, most_swaps
from tests.predict.tune.models import configuration, machine, model

ALONE = StepEstimator(machine(gpus=1), {1: model(), 2: model(micro_batch=2)})
PAIR = StepEstimator(machine(gpus=2), {1: model(), 2: model(micro_batch=2)})
PASSES_S = 3 * (1 + 4 * 10 + 2)
ADAM_S = 58 * 40 / 100


def test_chunk_size_wastes_fewest_bytes_and_chunks_list_their_blocks() -> None:
    assert [chunk.count for chunk in chunks_of(model())] == [8, 10, 10, 10, 10, 10]
    assert [list(chunk.blocks) for chunk in chunks_of(model())] == [[], [0], [1], [2], [3], []]


def test_step_time_on_one_gpu_sums_passes_optimizer_and_recomputation() -> None:
    assert ALONE.predict(configuration(stage=1)).step_s == pytest.approx(PASSES_S + ADAM_S)
    again = ALONE.predict(configuration(stage=1, n_checkpoint=3))
    assert again.step_s == pytest.approx(PASSES_S + ADAM_S + 3 * 10)
    four = ALONE.predict(configuration(stage=1, accumulation=4))
    assert four.step_s == pytest.approx(4 * PASSES_S + ADAM_S) and four.tokens == 4 * 100


def test_zero_3_step_time_follows_protrains_equations() -> None:
    """Count 10 s to gather half of a layer's 20 bytes, and 10 s to reduce it; each takes 8 s for the embedding."""
    at = configuration(n_buffer=2, n_checkpoint=1)
    chunks = [
        protrain.ChunkTimes(forward_s=f, backward_s=2 * f, recompute_s=r, gather_s=g, reduce_s=g)
        for f, r, g in ((1, 0, 8), (10, 10, 10), (10, 0, 10), (10, 0, 10), (10, 0, 10), (2, 0, 10))
    ]
    place = protrain.Placement(0, 2)
    passes_s = protrain.forward_s(chunks, place) + protrain.backward_s(chunks, place)
    assert PAIR.predict(at).step_s == pytest.approx(passes_s + ADAM_S / 2, abs=0.01)


def test_zero_1_reduces_once_per_step_and_zero_2_per_micro_batch() -> None:
    slow = StepEstimator(machine(gpus=2, collective_bytes_per_s=0.1, to_device=0.1), {1: model()})
    one, two = (slow.predict(configuration(stage=stage, accumulation=3)).step_s for stage in (1, 2))
    times = [
        protrain.ChunkTimes(forward_s=0, backward_s=b, reduce_s=r) for b, r in ((2, 80), *[(20, 100)] * 4, (4, 100))
    ]
    reducing_s = protrain.backward_s(times, protrain.Placement(0, 6)) - 2 * PASSES_S / 3
    assert two - one == pytest.approx(2 * reducing_s, abs=0.01) and reducing_s > 0


def test_host_optimizer_overlaps_device_optimizer_but_not_backward() -> None:
    """Put three chunks with 28 parameters on the device, where each rank updates half; the host updates 30 for both."""
    everything = PAIR.predict(configuration(offload="optimizer"))
    half = PAIR.predict(configuration(offload="optimizer", n_persist=3))
    on_host_s = 58 * 30 / 50 + 58 * 2 / 2
    half_s = max(28 / 2 * 40 / 100, 30 * 30 / 50) + 28 * 4 / 2 + 30 * 2 / 2
    assert everything.step_s - half.step_s == pytest.approx(on_host_s - half_s)


def test_zero_stage_and_offload_decide_where_states_and_parameters_lie() -> None:
    """Count 116 bytes of parameters, 696 of optimizer states, two buckets of 20 bytes, and 40 of gathered chunks."""
    saved = 10 + 4 * 70 + 30 + 20
    device = {
        (stage, offload): PAIR.predict(configuration(stage, offload)).device_bytes for stage, offload in all_layouts()
    }
    assert device[2, "none"] == 116 + 348 + max(58 + 40 + saved, 232 // 2 + 58)
    assert device[3, "none"] == 58 + 348 + 58 + 40 + 40 + saved
    assert device[3, "optimizer"] == 58 + 40 + 40 + saved
    assert device[3, "parameters"] == 40 + 40 + saved
    host = {each: PAIR.predict(configuration(*each)).host_bytes for each in device}
    assert host[2, "none"] == host[3, "none"] == 0
    assert host[1, "optimizer"] == host[3, "optimizer"] == 16 * 58 and host[3, "parameters"] == 18 * 58
    part = PAIR.predict(configuration(3, "optimizer", n_persist=2))
    assert part.host_bytes == 16 * 58 - 12 * 18 and part.device_bytes == device[3, "optimizer"] + 12 * 18 // 2


def test_checkpointed_and_swapped_blocks_keep_their_output_on_the_device() -> None:
    base = configuration(stage=2)
    kept, again = PAIR.predict(base), PAIR.predict(replace(base, n_checkpoint=2))
    assert kept.device_bytes - again.device_bytes == 2 * 60
    swapped = PAIR.predict(replace(base, n_swap=2))
    assert swapped.device_bytes == again.device_bytes + 3 * 40  # three buffers for swapped tensors
    assert swapped.host_bytes - kept.host_bytes == 2 * 2 * 40
    assert kept.step_s < swapped.step_s < again.step_s


ESTIMATORS = [
    PAIR,
    StepEstimator(machine(gpus=2, host_bytes_per_s=1.0), {1: model(), 2: model(micro_batch=2)}),
    StepEstimator(machine(gpus=8, to_device=100.0), {1: model(forward_s=0.1), 2: model(micro_batch=2)}),
]


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    stage, offload = draw(st.sampled_from(all_layouts()))
    layout = StepLayout(
        stage=stage, offload=offload, micro_batch=draw(st.integers(1, 2)), accumulation=draw(st.integers(1, 2))
    )
    box = free_box(layout, model())
    for axis in ("n_persist", "n_buffer", "n_swap", "n_checkpoint"):
        numbers = getattr(box, axis)
        first = draw(st.integers(0, len(numbers) - 1))
        box = replace(box, **{axis: numbers[first : draw(st.integers(first, len(numbers) - 1)) + 1]})
    return box


@settings(max_examples=300, deadline=None)
@given(boxes(), st.sampled_from(ESTIMATORS))
def test_bound_of_a_search_box_holds_for_all_its_configurations(box: Box, estimator: StepEstimator) -> None:
    least = estimator.least(box)
    for at in box:
        made = estimator.predict(at)
        assert least.step_s <= made.step_s * (1 + 1e-12)
        assert least.device_bytes <= made.device_bytes and least.host_bytes <= made.host_bytes


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("device", [150, 400, 500, 1200])
def test_pruned_search_finds_the_result_of_the_exhaustive_search(estimator: StepEstimator, device: int) -> None:
    every = [
        free_box(StepLayout(stage=stage, offload=offload, micro_batch=n, accumulation=1), model())
        for stage, offload in all_layouts()
        for n in (1, 2)
    ]
    limits = MemoryLimits(device, 1500)
    tried = search(every, estimator, limits, 10, exhaustive=10**9)
    bounded = search(every, estimator, limits, 10, exhaustive=0)
    assert bounded.best == tried.best and bounded.predicted < tried.predicted
    assert bool(tried.best) is (device > 150)


def test_swapped_blocks_are_limited_to_those_whose_copies_forward_hides() -> None:
    assert most_swaps(machine(), model()) == 1  # offloading 40 bytes takes 40 s, as long as four layers compute
    assert most_swaps(machine(to_host=2.5, host_bytes_per_s=1000.0), model()) == 2
    assert most_swaps(machine(to_host=100.0, host_bytes_per_s=1000.0), model()) == 4
