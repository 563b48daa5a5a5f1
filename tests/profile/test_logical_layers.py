"""Logical layers divide the operators of a step evenly, and their times add up to the step's."""

from collections import Counter
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplug.errors import TraceError
from memplug.profile.trace import Pass
from tests.support import rows
from tests.support.grouping import estimate_error, group_variation
from tests.support.logical_layers import group_edges, logical_layers
from tests.support.traces import Recording, recordings, training


@given(st.integers(0, 1000), st.integers(1, 1000))
def test_groups_are_even_complete_and_never_empty(operators, groups):
    edges = group_edges(operators, groups)
    sizes = np.diff(edges)
    assert (edges[0], edges[-1]) == (0, operators)
    assert len(sizes) == min(groups, operators)
    assert not len(sizes) or 1 <= sizes.min() <= sizes.max() <= sizes.min() + 1


def test_each_pass_is_divided_into_layers_and_the_optimizer_is_one_layer():
    trace = training(steps=2, micro_batches=2).trace()
    layers = logical_layers(trace, 1, groups=2)
    start = trace.steps[1][0]
    per_micro_batch = [(Pass.FORWARD, 2), (Pass.FORWARD, 2), (Pass.BACKWARD, 2), (Pass.BACKWARD, 2)]
    assert [(layer.kind, layer.operators) for layer in layers] == [*per_micro_batch * 2, (Pass.OPTIMIZER, 2)]
    assert [layer.first_operator for layer in layers] == [start + 2 * i for i in range(9)]
    assert [layer.micro_batch for layer in layers] == [0] * 4 + [1] * 4 + [-1]
    with pytest.raises(FrozenInstanceError):
        layers[0].seconds = 0.0


def test_seconds_of_a_layer_are_its_share_of_the_steps_operators():
    recording = Recording()
    recording.step(seconds=2.0)
    recording.op("data")
    recording.phase(Pass.FORWARD, 0)
    for _ in range(6):
        recording.op("mm")
    recording.phase(Pass.BACKWARD, 0)
    recording.op("mm")
    # Operators outside of layers count too: 2 s over 8 operators.
    layers = logical_layers(recording.trace(), 0, groups=4)
    assert [(layer.operators, layer.seconds) for layer in layers] == [
        (1, 0.25),
        (2, 0.5),
        (1, 0.25),
        (2, 0.5),
        (1, 0.25),
    ]


@given(recordings(), st.integers(1, 5))
def test_layers_hold_every_operator_of_a_pass_once_in_order(recording, groups):
    trace = recording.trace()
    for step in range(len(trace.steps)):
        inside = trace.step_operators(step)
        ran = [
            (operator.phase.kind, operator.phase.micro_batch)
            for operator in (rows.operator(trace, index) for index in range(inside.start, inside.stop))
        ]
        if ran and not trace.steps[step][2]:
            continue
        layers = logical_layers(trace, step, groups)
        held = Counter()
        for layer in layers:
            held[layer.kind, layer.micro_batch] += layer.operators
            place = rows.operator(trace, layer.first_operator).phase
            assert (layer.kind, layer.micro_batch) == (place.kind, place.micro_batch)
        assert held == Counter(phase for phase in ran if phase[0] not in (Pass.OTHER, Pass.NO_GRAD))
        firsts = [layer.first_operator for layer in layers]
        assert firsts == sorted(set(firsts))
        share = sum(held.values()) / max(len(ran), 1)
        assert sum(layer.seconds for layer in layers) == pytest.approx(trace.steps[step][2] * share)


def test_pass_that_another_pass_interrupts_is_divided_as_one_sequence():
    recording = Recording()
    recording.step()
    for name in "abcd":
        recording.phase(Pass.FORWARD, 0)
        recording.op(name)
        recording.phase(Pass.BACKWARD, 1)
        recording.op(name)
    layers = logical_layers(recording.trace(), 0, groups=2)
    assert [(layer.kind, layer.first_operator, layer.operators) for layer in layers] == [
        (Pass.FORWARD, 0, 2),
        (Pass.BACKWARD, 1, 2),
        (Pass.FORWARD, 4, 2),
        (Pass.BACKWARD, 5, 2),
    ]


def test_empty_step_has_no_layers_and_a_step_without_duration_raises():
    recording = Recording()
    recording.step(0.0)
    assert logical_layers(recording.trace(), 0, groups=3) == ()
    recording.op("mm")
    with pytest.raises(TraceError, match="duration of step 0"):
        logical_layers(recording.trace(), 0, groups=3)
    with pytest.raises(IndexError):
        logical_layers(recording.trace(), 1, groups=3)
    with pytest.raises(ValueError, match="groups"):
        logical_layers(training().trace(), 0, groups=0)


LAYER_S = np.array([5.0, 1.0, 0.5, 4.0, 0.5, 1.0])
"""Seconds of the operators of one layer, which differ widely."""


@pytest.mark.parametrize("groups", [1, 2, 4, 8, 16, 32])
def test_groups_of_whole_layers_have_equal_times_and_exact_estimates(groups):
    # Fig. 4: a model of 32 layers, up to 32 groups.
    model_s = np.tile(LAYER_S, 32)
    assert group_variation(model_s, groups) == pytest.approx(0, abs=1e-12)
    assert estimate_error(model_s, groups) == pytest.approx(0, abs=1e-12)


def test_more_groups_than_layers_increase_variation_and_estimate_error():
    model_s = np.tile(LAYER_S, 32)
    variation = [group_variation(model_s, groups) for groups in (32, 64, 192)]
    error = [estimate_error(model_s, groups) for groups in (32, 64, 192)]
    assert variation[0] < 0.01 < variation[1] < variation[2]
    assert error[0] < 0.01 < error[1] < error[2]


def test_variation_and_error_match_their_definitions():
    # Groups of 3 s and 5 s: the mean is 4, the deviation 1; the estimate is 4 for both.
    seconds = np.array([1.0, 2.0, 4.0, 1.0])
    assert group_variation(seconds, 2) == pytest.approx(1 / 4)
    assert estimate_error(seconds, 2) == pytest.approx((1 / 3 + 1 / 5) / 2)
    # The step is slower on average than this pass: 3 s an operator, 6 s a group.
    assert estimate_error(seconds, 2, seconds_per_operator=3.0) == pytest.approx((3 / 3 + 1 / 5) / 2)


def test_groups_without_time_have_infinite_error_and_zero_time_raises():
    assert estimate_error(np.array([1.0, 0.0]), 2) == np.inf
    for seconds in (np.zeros(3), np.array([])):
        with pytest.raises(ValueError, match="take time"):
            group_variation(seconds, 1)
