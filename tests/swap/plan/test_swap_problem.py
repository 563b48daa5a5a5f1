"""Swap problems of recorded steps: memory without swaps, gaps between uses."""

import numpy as np
import pytest
from hypothesis import given

from memplug.profile.records import OPERATOR
from memplug.swap.plan.from_trace import LinkLoad, gaps, in_use_bytes, marks, outside_of, swap_problem
from memplug.swap.plan.problem import Candidate, Swap, least_budget
from tests.support.swapping import three_tensors, with_an_optimizer
from tests.support.traces import Recording, recordings

IN_USE = [37, 57, 67, 67, 67, 67, 57, 57, 57, 57, 37, 7]


def test_memory_in_use_of_each_operator_is_the_peak_while_it_runs():
    assert in_use_bytes(three_tensors()).tolist() == IN_USE


def test_gaps_lie_between_consecutive_uses_of_tensors_made_in_the_step():
    # The third tensor is used at operators 2, 4 and 5; the parameter existed before the step.
    assert gaps(three_tensors(), 1) == [Candidate(0, 30, 0, 10), Candidate(1, 20, 1, 9), Candidate(2, 10, 2, 4)]
    assert gaps(three_tensors(), 20, others=(0,)) == [Candidate(1, 20, 1, 9)]


@given(recordings())
def test_gaps_contain_no_use_and_belong_to_tensors_made_in_the_step(recording):
    trace = recording.trace()
    for each in gaps(trace, 1):
        users = trace.uses[trace.uses["tensor"] == each.tensor]
        inside = (users["operator"] > each.last_use) & (users["operator"] < each.next_use)
        assert not inside.any() and each.next_use > each.last_use + 1
        assert {each.last_use, each.next_use} <= set(users["operator"].tolist())
        assert users[users["operator"] == users["operator"].min()]["output"].all()


@given(recordings())
def test_memory_in_use_equals_a_loop_over_events(recording):
    trace = recording.trace()
    expected = []
    for operator in range(len(trace.operators)):
        until = [i for i, event in enumerate(trace.events) if max(event["operator"], 0) < operator]
        during = [i for i, event in enumerate(trace.events) if max(event["operator"], 0) == operator]
        begins = trace.live_bytes[until[-1]] if until else trace.base_bytes
        expected.append(max([begins, *trace.live_bytes[during]]))
    assert in_use_bytes(trace).tolist() == expected


def test_optimizer_tensors_may_be_away_before_and_after_the_program():
    """Use two weights of 100 bytes with optimizer states of 50: forward at places 0 and 1, backward at 2 and 3.

    The optimizer runs outside of the program. The batch has no gap, since only the program uses it. A frozen weight has
    a gap only if it is named as resident.
    """
    recording = Recording()
    recording.step()
    weights, states = ([recording.tensor(nbytes) for _ in range(2)] for nbytes in (100, 50))
    read = [(recording.tensor(10), frozen := recording.tensor(70)), ()]
    gradients = [recording.tensor(100) for _ in range(2)]
    for layer in (0, 1):
        recording.op("aten::mm", (weights[layer], *read[layer]))
    for layer in (1, 0):
        recording.op("aten::mm", (weights[layer], *read[layer]), (gradients[layer],))
    for layer in (0, 1):
        recording.op("aten::empty")
        recording.op("aten::add_", (states[layer], gradients[layer]), (states[layer],))
        recording.op("aten::sub_", (weights[layer], states[layer]), (weights[layer],))
    operators = np.array(recording.operators, OPERATOR)
    operators["depth"][4:] = -1
    step = recording.trace(operators=operators)
    assert gaps(step, 1) == []
    found = gaps(step, 1, states=True)
    assert found == sorted(
        [
            Candidate(weights[1], 100, -1, 1),
            Candidate(states[0], 50, -1, 4),
            Candidate(states[1], 50, -1, 4),
            Candidate(weights[0], 100, 0, 3),
            Candidate(weights[1], 100, 2, 4),
            Candidate(gradients[1], 100, 2, 4),
        ],
        key=lambda each: (each.last_use, each.next_use, each.tensor),
    )
    assert set(gaps(step, 1, states=True, resident=[frozen])) - set(found) == {Candidate(frozen, 70, 0, 3)}
    assert [mark[:3] for mark in marks(step)] == [(3, 1, 0), (3, 2, 0), (3, 4, 0), (3, 5, 0)]
    assert {mark.tensor for mark in marks(step)} == {*weights, *states}
    assert outside_of(step, 3) == operators["name"][4:].tolist()


def test_optimizer_tensors_are_in_use_while_the_optimizer_runs():
    step = with_an_optimizer()
    assert in_use_bytes(step).tolist() == [62, 152, 62, 132]
    problem = swap_problem(step, LinkLoad(1.0, 1.0), budget_bytes=120, host_bytes=99, min_bytes=2, states=True)
    assert problem.candidates == (Candidate(1, 50, -1, 3),)
    assert problem.in_use_with((Swap(0, 0, 3),)).tolist() == [12, 102, 12, 132]
    assert least_budget(problem) == (132, 3)
    assert np.diff(problem.begin_s).tolist() == [pytest.approx(1 / 3)] * 3 + [0]


def test_candidates_are_tensors_with_excess_memory_in_their_gap():
    problem = swap_problem(three_tensors(), LinkLoad(10.0, 20.0), budget_bytes=60, host_bytes=99)
    assert problem.in_use_bytes.tolist() == IN_USE
    assert [each.tensor for each in problem.candidates] == [0, 1, 2]
    assert problem.begin_s.tolist() == list(range(13))
    assert (problem.d2h_bytes_per_s, problem.h2d_bytes_per_s, problem.host_bytes) == (10.0, 20.0, 99)
    assert swap_problem(three_tensors(), LinkLoad(1.0, 1.0), budget_bytes=67, host_bytes=0).candidates == ()
    longer = np.arange(12.0)
    problem = swap_problem(three_tensors(), LinkLoad(1.0, 1.0, 0.5), budget_bytes=60, host_bytes=0, operator_s=longer)
    assert problem.begin_s.tolist() == [0.0, *np.cumsum(longer).tolist()]
    assert problem.d2h_busy_s.tolist() == [0.5] * 12 and problem.h2d_busy_s.tolist() == [0.0] * 12
