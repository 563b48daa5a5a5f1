"""STWeaver's planner groups requests by phase and fuses groups if that is denser.

It places the groups by size, in few memory layers.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplug.arena.plan import spatiotemporal
from memplug.arena.plan.problem import Problem, Solution, solved, time_memory_product
from memplug.arena.plan.spatiotemporal import fuse, memory_layers
from tests.support.layouts import PHASES, is_valid, problem_of, problems

lifetimes = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), max_size=40).map(
    lambda drawn: sorted((lower, lower + length) for lower, length in drawn)
)


@given(lifetimes)
def test_algorithm_1_needs_one_memory_layer_per_simultaneous_request(drawn):
    layers = memory_layers(drawn)
    assert sorted(index for layer in layers for index in layer) == list(range(len(drawn)))
    for layer in layers:
        members = [drawn[index] for index in layer]
        assert all(a[1] <= b[0] for a, b in zip(members, members[1:], strict=False))
    most = max((sum(lower <= at < upper for lower, upper in drawn) for at in range(50)), default=0)
    assert len(layers) == most


def test_request_goes_to_the_memory_layer_that_became_free_last():
    # Both memory layers are free at 6: one became free at 2, the other at 5.
    layers = memory_layers([(0, 2), (1, 5), (6, 8)])
    assert layers == [[0], [1, 2]]


def _group(problem: Problem, first: int, last: int):
    rows = np.flatnonzero((problem.buffers["lower_phase"] == first) & (problem.buffers["upper_phase"] == last))
    return spatiotemporal._local_plan(problem.buffers, first, last, rows, np.arange(len(rows)))


def grouped(problem: Problem) -> Solution:
    """Return the solution by groups, before the final pass lowers buffers."""
    return solved(problem, spatiotemporal.by_groups(problem), "by groups")


def _phased(*rows: tuple[int, int, int, int, int]) -> Problem:
    problem = problem_of(*(row[:3] for row in rows), phases=PHASES)
    table = problem.buffers.copy()
    table["lower_phase"], table["upper_phase"] = [row[3] for row in rows], [row[4] for row in rows]
    return Problem(buffers=table, phases=PHASES)


def test_groups_are_fused_if_one_fills_the_bubbles_of_the_other():
    # The first group frees its upper half at 5; the second group needs as many bytes from 5 on.
    problem = _phased((0, 10, 4, 0, 1), (0, 5, 4, 0, 1), (5, 10, 4, 1, 1))
    groups = [_group(problem, 0, 1), _group(problem, 1, 1)]
    fused = fuse(problem.buffers, groups)
    assert len(fused) == 1 and fused[0].product == 1.0 and len(fused[0].rows) == 3


def test_groups_stay_apart_if_fusion_would_add_bubbles():
    problem = _phased((0, 10, 4, 0, 1), (10, 20, 9, 1, 1))
    groups = [_group(problem, 0, 1), _group(problem, 1, 1)]
    assert all(group.product == 1.0 for group in groups)
    assert fuse(problem.buffers, groups) == groups


@given(problems(most=12, fewest=2))
def test_fusion_never_lowers_the_time_memory_product_or_loses_requests(problem):
    table = problem.buffers
    keys = sorted({(int(row["lower_phase"]), int(row["upper_phase"])) for row in table})
    groups = [_group(problem, *key) for key in keys]
    fused = fuse(table, groups)
    assert sorted(np.concatenate([group.rows for group in fused]).tolist()) == list(range(len(problem)))
    for group in fused:
        assert group.product == time_memory_product(table[group.rows], group.offsets)
        inside = [other for other in groups if np.isin(other.rows, group.rows).all()]
        weight = sum(other.weight for other in inside)
        assert group.product >= sum(other.product * other.weight for other in inside) / weight - 1e-12


def test_buffers_that_live_throughout_lie_at_the_bottom():
    problem = problem_of((2, 5, 30), (0, 9, 4), (1, 3, 8), (0, 9, 2))
    offsets = spatiotemporal.by_groups(problem)
    assert sorted(offsets[[1, 3]].tolist()) == [0, 4] and offsets[[0, 2]].min() == 6


def test_smaller_requests_fill_the_time_between_larger_ones():
    problem = problem_of((0, 2, 10), (4, 6, 10), (2, 4, 6), (2, 4, 4), (0, 6, 1))
    solution = grouped(problem)
    assert solution.height == problem.lower_bound == 11 and is_valid(problem, solution)


def test_reuse_of_space_above_a_placed_request_is_valid():
    problem = problem_of((0, 1, 10), (9, 10, 10), (4, 6, 6), (2, 3, 5), (2, 3, 4), (2, 3, 4))
    assert is_valid(problem, grouped(problem))


@pytest.mark.long
@given(problems(most=40, fewest=15, latest=30, largest=9))
def test_final_pass_never_raises_the_height_of_the_groups(problem):
    alone = grouped(problem)
    assert is_valid(problem, alone) and spatiotemporal.solve(problem).height <= alone.height
