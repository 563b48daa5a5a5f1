"""A swap list as a part of a plan: made from a recorded step, refused for an impossible budget, read from a file."""

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest

from memplug.errors import SwapError
from memplug.profile.records import Layer, Pass, Phase
from memplug.swap.judge import mistakes_of_places
from memplug.swap.plan.features import Features, anchors, last_uses, ranks, uses_of
from memplug.swap.plan.other_copies import busy_s
from memplug.swap.plan.part import SwapBudgets, SwapPart, plan_part
from tests.support.swapping import three_tensors
from tests.support.traces import Recording, training

GIB = 2**30


def budgets(device_bytes, host_bytes=99, rate=100.0):
    return SwapBudgets(
        device_bytes=device_bytes, host_bytes=host_bytes, min_bytes=1, d2h_bytes_per_s=rate, h2d_bytes_per_s=rate
    )


def distinct():
    """Return the step of `three_tensors`; each operator has a name of its own, so no two uses look alike."""
    step = three_tensors()
    operators = step.operators.copy()
    operators["name"] = range(len(operators))
    return replace(step, names=tuple(f"aten::op{index}" for index in range(len(operators))), operators=operators)


def test_part_has_release_and_prefetch_places_and_predictions():
    part = plan_part(distinct(), budgets(57))
    (target,) = part.targets
    assert (target.nbytes, target.dtype, target.operator, target.output) == (30, "float32", "aten::op0", True)
    assert (target.last_use, target.next_use) == (0, 10) and target.last_use < target.release < target.prefetch
    assert (part.swapped_bytes, part.host_bytes, part.predicted_stall_s) == (30, 512, 0.0)
    assert part.predicted_peak_bytes <= 57 and part.predicted_step_s == 12.0
    assert [part.names[name] for name in part.program] == [f"aten::op{index}" for index in range(12)]


def test_step_that_fits_has_an_empty_list():
    assert plan_part(distinct(), budgets(67)).targets == ()


def test_impossible_budget_error_names_least_budget_and_its_operator():
    with pytest.raises(SwapError, match="operator 0 .aten::op0. takes 3.45e-08 GiB") as refused:
        plan_part(distinct(), budgets(36))
    assert "3.45e-08" in refused.value.advice
    assert float("3.45e-08") * GIB == pytest.approx(37, abs=0.1)
    with pytest.raises(SwapError, match="host memory are too little"):
        plan_part(distinct(), budgets(40, host_bytes=10))
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)


def test_tensors_of_other_techniques_are_not_swapped():
    assert [target.nbytes for target in plan_part(distinct(), budgets(57), others=(1, 2)).targets] == [30]
    with pytest.raises(SwapError):
        plan_part(distinct(), budgets(50), others=(0, 1, 2))


def test_layer_copies_occupy_the_link_after_forward_and_before_backward():
    """Use operators of 1 s, and two layers whose copies take 3 and 1 s to the host, 1.5 and 0.5 s back.

    In each of two micro-batches layer 0 begins forward at 0 and 8 s, and backward at 6 and 14 s; layer 1 begins forward
    at 2 and 10 s, and backward at 4 and 12 s.
    """
    step = training(steps=1).trace()
    out_s, back_s = busy_s(step, np.arange(19.0), {"layers.0": 30, "layers.1": 10}, 10.0, 20.0)
    assert out_s.tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    assert back_s.tolist() == [0, 0, 0, 0.5, 0.5, 1, 0, 0, 0, 0, 0, 0.5, 0.5, 1, 0, 0, 0, 0]
    assert not any(each.any() for each in busy_s(step, np.arange(19.0), {}, 10.0, 20.0))


def test_swaps_use_the_link_time_that_layer_copies_leave():
    """Swap 20 bytes that are used until 2 s and must be released then: the step stalls for their copy of 2 s.

    A layer's copy that occupies the link from 1 to 4 s makes the stall 2 s longer.
    """
    step = distinct()
    operators = step.operators.copy()
    operators["layer"][1:3] = 0
    step = replace(
        step, operators=operators, layers=(Layer("layers.0"),), phases=(Phase(Pass.FORWARD, 0),) * len(step.phases)
    )
    for layer_bytes, stall_s in ((None, 2.0), ({"layers.0": 30}, 4.0)):
        part = plan_part(step, budgets(57, rate=10.0), layer_bytes=layer_bytes)
        assert [(each.nbytes, each.release) for each in part.targets] == [(20, 2)]
        assert part.predicted_stall_s == stall_s


def test_part_written_and_read_back_is_equal():
    part = plan_part(distinct(), budgets(50))
    assert SwapPart.from_file(json.loads(json.dumps(part.to_file()))) == part
    assert SwapPart.from_file(json.loads(json.dumps(SwapPart().to_file()))) == SwapPart()
    with pytest.raises(ValueError, match="the field .* is missing"):
        SwapPart.from_file({})


BROKEN = {
    "of 0 bytes": {"nbytes": 0},
    "not in order": {"release": 0},
    "is not in order": {"prefetch": 11, "next_use": 10},
    "in order: used": {"next_use": 13},
    "no anchor tells which tensor": {"last_use": -1, "key": 3},
    "which the program does not run": {"operator": "aten::none"},
    "too few for the swapped tensors": {"nbytes": 513},
}


@pytest.mark.parametrize("words", BROKEN)
def test_judge_refuses_impossible_part(words):
    part = plan_part(distinct(), budgets(50))
    assert list(mistakes_of_places(part)) == []
    broken = replace(part, targets=(replace(part.targets[0], **BROKEN[words]),))
    assert any(words in mistake for mistake in mistakes_of_places(broken))


def test_features_are_use_count_operator_kinds_and_last_eight_readers():
    features = Features()
    for rank in (1, 2, 2, 33, 255, 1, 1, 1, 1):
        features = features.read_by(rank)
    assert features == Features(uses=9, kinds=0b11, recent=int("020221ff01010101", 16))


def test_most_frequent_operator_has_rank_one():
    recording = Recording()
    recording.step()
    for name in ("b", "a", "b", "c", "b", "a"):
        recording.op(name)
    assert {recording.names[name]: rank for name, rank in ranks(recording.trace()).items()} == {"b": 1, "a": 2, "c": 3}


def test_output_of_outer_operator_is_listed_after_uses_by_inner_ones():
    recording = Recording()
    recording.step()
    tensor = recording.tensor(100)
    outer = recording.op("outer", (), (tensor,))
    recording.op("inner", (tensor,), (tensor,))
    recording.op("next", (tensor,))
    trace = recording.trace()
    operators = trace.operators.copy()
    operators["depth"] = (0, 1, 0)
    seen = [
        (trace.names[use.name], use.output, use.place, use.features.uses)
        for _, use in uses_of(replace(trace, operators=operators))
    ]
    assert outer == 0
    assert seen == [("inner", False, 0, 1), ("inner", True, 0, 1), ("outer", True, 0, 1), ("next", False, 1, 2)]


def doubles(anchored):
    """Return, for each tensor that has a tolerance, the number of places by which its last use may be off.

    The step has three tensors that look alike. The second and the third are read three places apart. If `anchored`, an
    anchor lies between these two reads.
    """
    recording = Recording()
    recording.step()
    tensors, weight = [recording.tensor(100) for _ in range(3)], recording.tensor(64)
    reads = {10: (tensors[0],), 40: (tensors[1],), 43: (tensors[2],), **({42: (weight,)} if anchored else {})}
    for place in range(50):
        name = "aten::mul" if place in (10, 40, 43) else f"aten::other{place}"
        recording.op(name, reads.get(place, ()), (tensors[place],) if place < 3 else ())
    looks = last_uses(recording.trace(), {(tensors[0], 10), (tensors[1], 40), (tensors[2], 43)})
    return {tensor: tolerance for (tensor, _), (_, tolerance) in looks.items()}


def test_tolerance_is_limited_by_the_nearest_look_alike():
    # The last two tensors have no tolerance: after a few inserted or removed operators one would pass for the other.
    assert doubles(anchored=False) == {0: 14}


def test_anchor_distinguishes_look_alikes_on_its_two_sides():
    # The third tensor has no tolerance: after operators inserted before it, the second one would look like the third.
    assert doubles(anchored=True) == {0: 14, 1: 1}


def test_parameters_read_by_outermost_operators_are_anchors():
    assert anchors(distinct()) == [(place, 0, 3) for place in (0, 1, 2, 3, 6, 7, 8, 11)]
