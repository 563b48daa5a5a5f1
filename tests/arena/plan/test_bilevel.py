"""The bilevel planner finds layers with the same requests, places one of them, and repeats its addresses for all."""

import dataclasses
import time

import numpy as np
import pytest

from memplug.arena.judge import judge
from memplug.arena.plan import bilevel
from memplug.arena.plan.from_trace import last_step
from memplug.arena.plan.from_trace import problem_of as problem_of_trace
from memplug.arena.plan.patterns import stretches
from memplug.arena.plan.problem import Buffer, Problem, buffers
from memplug.profile.trace_file import load
from tests.support.folders import DATA
from tests.support.layouts import problem_of

UNKNOWN = {"lower_phase": -1, "upper_phase": -1, "lower_layer": -1, "upper_layer": -1}


def recorded(case: str) -> Problem:
    return problem_of_trace(last_step(load(DATA / f"{case}.npz")))


def without_places(problem: Problem) -> Problem:
    table = problem.buffers.copy()
    for name, value in UNKNOWN.items():
        table[name] = value
    return dataclasses.replace(problem, buffers=table)


def layers(count: int, inner: tuple[int, ...], *, odd: int = 0) -> Problem:
    """Return `count` equal layers, each of brief requests and one that lasts to the end; then `odd` other requests."""
    rows, clock = [], 0
    end = count * (2 * len(inner) + 1) + 2 * odd + 1
    for _ in range(count):
        for nbytes in inner:
            rows.append(Buffer(lower=clock, upper=clock + 2, size=nbytes))
            clock += 2
        rows.append(Buffer(lower=clock, upper=end, size=5))
        clock += 1
    for at in range(odd):
        rows.append(Buffer(lower=clock, upper=clock + 2, size=100 + at))
        clock += 2
    return Problem(buffers=buffers(rows))


@pytest.mark.parametrize(
    ("case", "count"), [("llama7b_long_ckpt", 8), ("llama7b_nockpt", 32), ("llama7b_ckpt", 64), ("mixtral_ckpt", 12)]
)
def test_layers_are_found_in_recorded_steps_without_known_places(case, count):
    problem = without_places(recorded(case))
    found = stretches(problem.buffers)
    patterns = {stretch.pattern for stretch in found}
    assert 1 <= len(patterns) <= 3, "a forward, a backward, and the layers at either end"
    # The first and the last layer may be missed, since their neighbours differ.
    assert count - 4 <= len(found) <= 2 * count + 2
    ends = [stretch.end for stretch in found]
    assert all(end <= stretch.begin for end, stretch in zip(ends, found[1:], strict=False))


@pytest.mark.parametrize("case", ["llama7b_long_ckpt", "mixtral_ckpt"])
@pytest.mark.parametrize("by_place", [True, False])
def test_found_layers_are_disjoint_and_repeat_their_pattern(case, by_place):
    table = recorded(case).buffers
    found = stretches(table, by_place=by_place)
    seen = np.concatenate([stretch.rows for stretch in found])
    assert len(np.unique(seen)) == len(seen) > len(table) / 2
    for stretch in found:
        rows = table[stretch.rows]
        assert stretch.end - stretch.begin >= 2 * len(rows) and (np.diff(rows["lower"]) > 0).all()
    by_pattern = {}
    for stretch in found:
        rows = table[stretch.rows]
        shape = (rows["size"].tolist(), (rows["upper"] - rows["lower"]).tolist())
        assert by_pattern.setdefault(stretch.pattern, shape) == shape


@pytest.mark.parametrize("case", ["llama7b_long_ckpt", "mixtral_ckpt", "llama7b_nockpt"])
def test_layers_of_one_pattern_get_equal_relative_addresses(case):
    problem = recorded(case)
    for by_place in (True, False):
        found = stretches(problem.buffers, by_place=by_place)
        solution = bilevel._by_two_levels(problem, found, time.monotonic() + 2, problem.lower_bound)
        assert judge(problem, solution) == ()
        relative = {}
        for stretch in found:
            offsets = solution.offsets[stretch.rows]
            inside = (offsets - offsets.min()).tolist()
            assert relative.setdefault(stretch.pattern, inside) == inside


def test_only_repeated_sequences_are_found_as_layers():
    problem = layers(6, (8, 3, 9, 2, 7, 1, 6, 4, 10), odd=5)
    found = stretches(problem.buffers)
    assert len(found) >= 5 and {len(stretch.rows) for stretch in found} == {9}
    assert problem.buffers["size"][np.concatenate([stretch.rows for stretch in found])].max() == 10
    assert stretches(layers(1, tuple(range(1, 30))).buffers) == []


def test_short_repeats_are_not_layers():
    assert stretches(layers(40, (3,)).buffers) == []


@pytest.mark.parametrize("rows", [(), ((0, 1, 1),), ((0, 3, 2), (1, 2, 2))])
def test_problem_without_layers_is_solved_in_one_level(rows):
    problem = problem_of(*rows)
    assert stretches(problem.buffers) == []
    assert bilevel.solve(problem).height == problem.lower_bound


def test_short_repeats_are_layers_if_their_places_are_known():
    table = layers(2, (8, 3, 9)).buffers.copy()
    assert stretches(table) == [], "two short repeats are no layers without places"
    table["lower_phase"] = table["upper_phase"] = 0
    table["lower_layer"] = table["upper_layer"] = np.repeat([0, 1], 4)
    found = stretches(table)
    assert [len(stretch.rows) for stretch in found] == [3, 3] and found[0].pattern == found[1].pattern
    table["alignment"][4:] = 4
    assert stretches(table) == [], "another alignment is another pattern"
