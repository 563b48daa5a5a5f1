"""The judge accepts exactly the solutions that meet the definition, and names each fault."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplug.arena.judge import Fault, judge
from memplug.arena.plan.problem import ORDERING, Buffer, Problem, Solution, buffers, solved
from tests.support.layouts import at, first_fit, is_valid, problem_of, problems, stacked


def codes(findings):
    return [finding.code for finding in findings]


small = partial(problems, largest=5, latest=10, alignments=(1, 1, 2))


@given(small(8), st.data())
@settings(max_examples=300)
def test_judge_accepts_exactly_the_valid_solutions(problem, data):
    offsets = data.draw(st.lists(st.integers(-1, 12), min_size=len(problem), max_size=len(problem)))
    height = data.draw(st.integers(0, 17))
    solution = Solution(offsets=np.array(offsets, np.int64), height=height, planner="test")
    assert (judge(problem, solution) == ()) == is_valid(problem, solution)
    tight = at(problem, *offsets)
    assert (judge(problem, tight) == ()) == is_valid(problem, tight)


@given(small(8, streams=3), st.data())
@settings(max_examples=300)
def test_judge_accepts_exactly_the_valid_solutions_on_several_streams(problem, data):
    dense = first_fit(problem, data.draw(st.permutations(range(len(problem)))))
    assert judge(problem, dense) == ()
    offsets = dense.offsets.copy()
    if len(problem):
        offsets[data.draw(st.integers(0, len(problem) - 1))] = data.draw(st.integers(0, 12))
    moved = at(problem, *offsets)
    assert (judge(problem, moved) == ()) == is_valid(problem, moved)


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_judge_finds_one_misplaced_buffer_among_many(seed, streams):
    random = np.random.default_rng(seed)
    count = 150
    table = buffers(random.integers(1, 60, (count, 3)))
    table["upper"] = table["lower"] + random.integers(1, 12, count)
    table["stream"] = random.integers(0, streams, count)
    orderings = np.array(sorted(map(tuple, random.integers(0, (70, 3, 3), (60, 3)).tolist())), ORDERING)
    problem = Problem(buffers=table, orderings=orderings)
    dense = first_fit(problem, np.argsort(-table["size"]).tolist())
    assert judge(problem, dense) == () and is_valid(problem, dense)
    verdicts = set()
    for row in random.permutation(count)[:40].tolist():
        offsets = dense.offsets.copy()
        offsets[row] = max(offsets[row] + random.integers(-30, 30), 0)
        moved = at(problem, *offsets)
        found = judge(problem, moved)
        assert (found == ()) == is_valid(problem, moved)
        verdicts.add(bool(found))
    assert True in verdicts


def test_judge_names_both_buffers_of_a_one_byte_overlap_among_thousands():
    lanes, length = 64, 64
    lane, number = np.divmod(np.random.default_rng(0).permutation(lanes * length), length)
    problem = Problem(buffers=buffers(np.stack([3 * number, 3 * number + 3, np.full(len(lane), 8)], axis=1)))
    offsets = 8 * lane
    assert judge(problem, solved(problem, offsets, "test")) == ()
    row = int(np.flatnonzero((lane == 7) & (number == 9))[0])
    offsets[row] += 1
    (found,) = judge(problem, solved(problem, offsets, "test"))
    assert found.code == Fault.OVERLAP
    assert set(found.rows) == {row, int(np.flatnonzero((lane == 8) & (number == 9))[0])}


@pytest.mark.parametrize("lane", [0, 1, 31, 50, 63])
def test_large_buffer_overlaps_small_ones_only_if_lifetimes_overlap(lane):
    before, after = [(0, 1, 8)] * 64, [(3, 4, 8)] * 64
    offsets = [*range(0, 512, 8), 0, *range(0, 512, 8)]
    problem = problem_of(*before, (1, 3, 512), *after)
    assert judge(problem, at(problem, *offsets)) == ()
    after[lane] = (2, 4, 8)
    (found,) = judge(problem_of(*before, (1, 3, 512), *after), at(problem, *offsets))
    assert (found.code, set(found.rows)) == (Fault.OVERLAP, {64, 65 + lane})


def test_problem_without_buffers_needs_height_zero():
    nothing = problem_of()
    assert judge(nothing, at(nothing)) == ()
    assert codes(judge(nothing, replace(at(nothing), height=1))) == [Fault.HEIGHT]


TWO = problem_of((0, 2, 4), (1, 3, 8))
ALIGNED = Problem(buffers=buffers([Buffer(lower=0, upper=2, size=4, alignment=4)]))
FAULTS = {
    "offsets of 32 bits": (TWO, Solution(offsets=np.array([0, 4], np.int32), height=12, planner=""), Fault.NO_OFFSETS),
    "a list": (TWO, Solution(offsets=[0, 4], height=12, planner=""), Fault.NO_OFFSETS),
    "a table": (TWO, Solution(offsets=np.array([[0, 4]]), height=12, planner=""), Fault.NO_OFFSETS),
    "one left out": (TWO, Solution(offsets=np.array([0]), height=4, planner=""), Fault.LEFT_OUT),
    "one too many": (TWO, Solution(offsets=np.array([0, 4, 12]), height=12, planner=""), Fault.LEFT_OUT),
    "negative": (TWO, Solution(offsets=np.array([-4, 0]), height=8, planner=""), Fault.NEGATIVE),
    "misaligned": (ALIGNED, at(ALIGNED, 2), Fault.MISALIGNED),
    "beyond the arena": (TWO, Solution(offsets=np.array([0, 4]), height=11, planner=""), Fault.BEYOND_ARENA),
    "far beyond the arena": (
        TWO,
        Solution(offsets=np.array([0, 2**63 - 1]), height=12, planner=""),
        Fault.BEYOND_ARENA,
    ),
    "height beyond 64 bits": (
        TWO,
        Solution(offsets=np.array([0, 2**63 - 1]), height=2**70, planner=""),
        Fault.BEYOND_ARENA,
    ),
    "too high": (TWO, Solution(offsets=np.array([0, 4]), height=13, planner=""), Fault.HEIGHT),
    "float height": (TWO, Solution(offsets=np.array([0, 4]), height=12.0, planner=""), Fault.HEIGHT),
    "negative height": (TWO, Solution(offsets=np.array([0, 4]), height=-12, planner=""), Fault.HEIGHT),
    "overlap": (TWO, at(TWO, 0, 3), Fault.OVERLAP),
    "overlap from below": (TWO, at(TWO, 2, 0), Fault.OVERLAP),
}


@pytest.mark.parametrize("name", FAULTS)
def test_judge_reports_the_code_of_each_fault(name):
    problem, solution, code = FAULTS[name]
    assert codes(judge(problem, solution)) == [code]


def test_judge_reports_all_faults_at_once():
    problem = Problem(buffers=buffers([Buffer(lower=0, upper=2, size=4, alignment=4)] * 2))
    found = judge(problem, Solution(offsets=np.array([1, 2]), height=5, planner=""), capacity_bytes=5)
    assert codes(found) == [Fault.MISALIGNED, Fault.BEYOND_ARENA, Fault.BEYOND_CAPACITY, Fault.OVERLAP]


def test_overlap_message_names_buffers_bytes_and_time():
    problem = problem_of((0, 5, 8), (5, 9, 8), (3, 9, 8), ids=np.array(["x", "y", "z"]))
    (found,) = judge(problem, at(problem, 0, 0, 6))
    assert sorted(found.rows) == [0, 2]
    assert found.message == "buffers x and z both use bytes 6 up to 8 from 3 up to 5"


def test_faults_of_one_kind_are_counted_in_one_finding():
    problem = problem_of((0, 1, 4), (1, 2, 4), (2, 3, 4))
    (found,) = judge(problem, at(problem, -4, 0, -8))
    assert found.message == "buffer 0 is at offset -4, below 0 (and 1 more)"


@pytest.mark.parametrize(("capacity", "accepted"), [(12, True), (11, False), (0, False), (None, True)])
def test_arena_larger_than_its_capacity_is_a_fault(capacity, accepted):
    found = judge(TWO, at(TWO, 0, 4), capacity_bytes=capacity)
    assert codes(found) == ([] if accepted else [Fault.BEYOND_CAPACITY])


def test_judge_ignores_the_claim_of_optimality():
    assert judge(TWO, replace(stacked(TWO), optimal=True, planner="", seconds=float("nan"), timed_out=True)) == ()


HALF_OPEN = {"one after the other": ((0, 3), (3, 5), True), "at once": ((0, 4), (3, 5), False)}


@pytest.mark.parametrize("name", HALF_OPEN)
def test_lifetimes_are_half_open(name):
    one, other, accepted = HALF_OPEN[name]
    problem = problem_of((*one, 4), (*other, 4))
    assert codes(judge(problem, at(problem, 0, 0))) == ([] if accepted else [Fault.OVERLAP])


ORDERINGS = {
    "no wait": ([], False),
    "between free and malloc": ([(4, 0, 1)], True),
    "at the free": ([(2, 0, 1)], True),
    "at the malloc": ([(6, 0, 1)], True),
    "before the free": ([(1, 0, 1)], False),
    "after the malloc": ([(7, 0, 1)], False),
    "in the other direction": ([(4, 1, 0)], False),
    "between other streams": ([(4, 0, 2), (4, 2, 3)], False),
    "through a third stream": ([(3, 0, 2), (5, 2, 1)], True),
    "through two other streams": ([(3, 0, 2), (4, 2, 7), (5, 7, 1)], True),
    "through a third stream, in the wrong order": ([(3, 2, 1), (5, 0, 2)], False),
    "through a third stream, before the free": ([(1, 0, 2), (5, 2, 1)], False),
    "at one instant": ([(4, 0, 2), (4, 2, 1)], True),
    "at one instant, in the wrong order": ([(4, 2, 1), (4, 0, 2)], False),
    "the second of three waits": ([(1, 0, 1), (5, 0, 1), (8, 0, 1)], True),
    "waits of streams for themselves": ([(4, 0, 0), (4, 1, 1)], False),
}


@pytest.mark.parametrize("name", ORDERINGS)
def test_streams_share_bytes_only_if_a_wait_lies_between_free_and_malloc(name):
    orderings, accepted = ORDERINGS[name]
    problem = problem_of((0, 2, 4, 0), (6, 8, 4, 1), orderings=orderings)
    assert codes(judge(problem, at(problem, 0, 0))) == ([] if accepted else [Fault.UNORDERED])
    assert judge(problem, at(problem, 0, 4)) == ()


def test_buffers_of_two_streams_overlap_if_live_at_the_same_time():
    problem = problem_of((0, 4, 4, 0), (3, 8, 4, 1), orderings=[(3, 0, 1)])
    assert codes(judge(problem, at(problem, 0, 2))) == [Fault.OVERLAP]


def test_stream_must_wait_for_all_bytes_of_a_partly_reused_buffer():
    """Reuse half of the first buffer on stream 0; stream 1 must still wait before it uses the other half."""
    problem = problem_of((0, 2, 8, 0), (2, 4, 4, 0), (5, 6, 4, 1), orderings=[(1, 0, 1)])
    assert codes(judge(problem, at(problem, 0, 0, 4))) == [Fault.UNORDERED]
    assert codes(judge(problem, at(problem, 0, 4, 4))) == [Fault.UNORDERED]
    waited = problem_of((0, 2, 8, 0), (2, 4, 4, 0), (5, 6, 4, 1), orderings=[(3, 0, 1)])
    assert judge(waited, at(waited, 0, 0, 4)) == ()
    assert codes(judge(waited, at(waited, 0, 4, 4))) == [Fault.UNORDERED]
