"""The exact planner solves small problems, and claims an optimum only if it has proven it."""

import itertools
import time

import pytest
from hypothesis import given, settings

from memplug.arena.judge import judge
from memplug.arena.plan import exact
from memplug.arena.plan.from_trace import last_step
from memplug.arena.plan.from_trace import problem_of as problem_of_trace
from memplug.arena.plan.patterns import stretches
from memplug.arena.plan.problem_file import read_csv
from memplug.profile.trace_file import load
from tests.support.folders import DATA
from tests.support.layouts import first_fit, is_valid, problem_of, problems

BACKENDS = ("native", "milp")


def solve(problem, backend="native", seconds=20.0, **more):
    return exact.solve(problem, deadline_s=time.monotonic() + seconds, backend=backend, **more)


@pytest.mark.parametrize("backend", BACKENDS)
@given(problem=problems(most=6, latest=8, largest=6))
@settings(max_examples=30)
def test_exact_height_equals_the_best_of_all_first_fit_orders(backend, problem):
    lowest = min(
        (first_fit(problem, list(order)).height for order in itertools.permutations(range(len(problem)))), default=0
    )
    solution = solve(problem, backend)
    assert (solution.height, solution.optimal, solution.timed_out) == (lowest, True, False)
    assert is_valid(problem, solution)


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_agree_where_the_optimum_exceeds_the_lower_bound(backend):
    # Found by random search: every solution of this problem has a hole.
    problem = problem_of((0, 5, 3), (4, 9, 4), (8, 12, 3), (2, 7, 4), (6, 10, 3), (0, 3, 4), (9, 12, 4), (5, 6, 1))
    assert solve(problem, backend).height == solve(problem, "native").height
    assert solve(problem, backend).optimal


@pytest.mark.parametrize("seconds", [-1.0, 0.0])
def test_expired_deadline_gives_a_valid_solution_marked_as_timed_out(seconds):
    problem = read_csv(DATA / "dsa" / "minimalloc_E.1048576.csv")
    solution = solve(problem, seconds=seconds)
    assert judge(problem, solution) == () and solution.timed_out and not solution.optimal


@pytest.mark.parametrize("name", ["A", "C", "D"])
def test_minimalloc_instances_fit_their_capacity(name):
    problem = read_csv(DATA / "dsa" / f"minimalloc_{name}.1048576.csv")
    solution = solve(problem, seconds=60, enough_bytes=1048576)
    assert solution.height <= 1048576 and judge(problem, solution) == () and not solution.timed_out
    assert solution.optimal is (solution.height == problem.lower_bound), (
        "fitting the capacity does not prove optimality"
    )


def test_resnet50_is_solved_to_its_lower_bound():
    problem = read_csv(DATA / "dsa" / "somas_resnet50.csv")
    solution = solve(problem, seconds=60)
    assert solution.height == problem.lower_bound and solution.optimal and judge(problem, solution) == ()


@pytest.mark.parametrize("case", ["llama7b_ckpt", "llama7b_nockpt", "mixtral_ckpt"])
def test_layers_of_recorded_steps_are_solved_to_optimality(case):
    problem = problem_of_trace(last_step(load(DATA / f"{case}.npz")))
    patterns = {stretch.pattern: stretch for stretch in stretches(problem.buffers)}
    assert max(len(stretch.rows) for stretch in patterns.values()) > 60
    for stretch in patterns.values():
        layer = problem.part(stretch.rows)
        solution = solve(layer, seconds=5)
        assert solution.optimal and judge(layer, solution) == ()


def test_problem_too_large_to_solve_gets_a_valid_solution():
    problem = problem_of(*((at, at + 50, 1 + at % 7) for at in range(exact.LARGEST + 1)))
    solution = solve(problem, seconds=0.2)
    assert judge(problem, solution) == () and solution.planner == "exact"
