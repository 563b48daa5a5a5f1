"""Every planner returns a valid solution for any problem, at any deadline."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplug import planners
from memplug.arena.judge import judge
from memplug.arena.plan import auto, search
from memplug.arena.plan.from_trace import last_step
from memplug.arena.plan.from_trace import problem_of as problem_of_trace
from memplug.arena.plan.intervals import instants, largest_within, load_bytes, sections
from memplug.arena.plan.problem import Problem, fragmentation, solved
from memplug.arena.plan.streams import on_one_stream
from memplug.errors import LayoutError
from memplug.profile.trace_file import load
from tests.support.folders import DATA
from tests.support.layouts import first_fit, is_valid, problem_of, problems, stacked
from tests.support.schedules import SCHEDULES, record

ALONE = {planner.name: planner for planner in planners.PLANNERS}
RECORDED = sorted(path.stem for path in DATA.glob("*.npz"))


def soon(seconds: float = 0.1) -> float:
    return time.monotonic() + seconds


@given(problem=problems(most=14, streams=2), planner=st.sampled_from(planners.names()))
@settings(max_examples=60)
def test_buffers_that_outlive_the_step_lie_below_all_others(problem, planner):
    solution = auto.plan(problem, planner, time_limit_s=0.02)
    assert is_valid(problem, solution) and judge(problem, solution) == ()
    table = problem.buffers
    kept = auto._kept(problem)
    ends = solution.offsets + table["size"]
    assert ends[kept].max(initial=0) <= solution.offsets[~kept].min(initial=solution.height)


@pytest.mark.parametrize("name", ALONE)
@given(problem=problems(most=14), seconds=st.sampled_from((0.0, 0.02)))
@settings(max_examples=60)
def test_planner_solution_is_valid_and_its_optimality_claim_true(name, problem, seconds):
    solution = ALONE[name].solve(problem, deadline_s=soon(seconds), enough_bytes=None)
    assert is_valid(problem, solution) and solution.planner == name
    assert solution.height >= problem.lower_bound
    assert not solution.optimal or name == "exact" or solution.height == problem.lower_bound


@pytest.mark.parametrize("name", planners.names())
@given(problem=problems(most=10, streams=3))
@settings(max_examples=40)
def test_plans_on_several_streams_are_valid_and_pass_the_judge(name, problem):
    solution = auto.plan(problem, name, time_limit_s=0.02)
    assert judge(problem, solution) == () and is_valid(problem, solution)


@pytest.mark.parametrize("name", planners.names())
@pytest.mark.parametrize("rows", [(), ((3, 4, 5),), ((0, 2, 1),) * 7, ((-9, -2, 4), (-5, 2**40, 2**50))])
def test_planners_reach_the_lower_bound_of_degenerate_problems(name, rows):
    problem = problem_of(*rows)
    solution = auto.plan(problem, name, time_limit_s=0.1)
    assert is_valid(problem, solution) and solution.height == problem.lower_bound and solution.optimal


@pytest.mark.parametrize("name", [name for name in planners.names() if name != "exact"])
@pytest.mark.parametrize("case", RECORDED)
def test_recorded_steps_fragment_by_at_most_half_a_percent(case, name):
    problem = problem_of_trace(last_step(load(DATA / f"{case}.npz")))
    solution = auto.plan(problem, name, time_limit_s=2)
    assert judge(problem, solution) == ()
    assert fragmentation(problem.lower_bound, solution.height) <= 0.005


@pytest.mark.long
@pytest.mark.parametrize("case", ["gpt2-n", "llama2-7b-r"])
def test_synthetic_steps_fragment_by_at_most_half_a_percent(case):
    problem = problem_of_trace(record(SCHEDULES[case]))
    solution = auto.plan(problem, time_limit_s=5)
    assert judge(problem, solution) == ()
    assert fragmentation(problem.lower_bound, solution.height) <= 0.005


# -- auto --------------------------------------------------------------------------------------------------------------


def test_auto_returns_the_lowest_solution(monkeypatch):
    problem = problem_of((0, 2, 5), (1, 4, 3), (3, 6, 5), (0, 6, 2))
    best = auto.plan(problem).height
    monkeypatch.setattr(auto.search, "solve", lambda problem, **_: stacked(problem))
    assert auto.plan(problem).height == best and auto.plan(problem).planner == "exact"
    assert stacked(problem).height > best


def test_auto_tries_further_planners_only_if_the_first_are_refused(monkeypatch):
    problem = problem_of((0, 2, 5), (1, 4, 3), (3, 6, 5), (0, 6, 2))
    for name in ("search", "exact"):
        monkeypatch.setattr(getattr(auto, name), "solve", lambda problem, **_: stacked(problem))
    tried = []
    auto.plan(problem, progress=tried.append)
    assert not {"bilevel", "spatiotemporal"} & set(tried)
    for name in ("search", "exact"):  # now the judge refuses both solutions
        flat = solved(problem, np.zeros(4, np.int64), name)
        monkeypatch.setattr(getattr(auto, name), "solve", lambda problem, flat=flat, **_: flat)
    assert auto.plan(problem, progress=tried.append, time_limit_s=1.0).planner == "spatiotemporal"


def test_auto_logs_a_refused_solution_and_takes_the_next_best(monkeypatch, caplog):
    problem = problem_of((0, 4, 2), (0, 4, 2), (1, 3, 5))
    flat = solved(problem, np.zeros(3, np.int64), "search")
    monkeypatch.setattr(auto.search, "solve", lambda problem, **_: flat)
    solution = auto.plan(problem, time_limit_s=0.2)
    assert is_valid(problem, solution) and solution.planner != "search"
    assert "the judge refuses the solution of search" in caplog.text
    with pytest.raises(LayoutError, match="accepts no plan"):
        auto.plan(problem, "search", time_limit_s=0.2)


def test_auto_aims_at_the_capacity_but_may_exceed_it():
    problem = problem_of(*((at, at + 3, 1 + at % 4) for at in range(40)))
    assert auto.plan(problem, capacity_bytes=10_000).height <= 10_000
    assert auto.plan(problem, capacity_bytes=1, time_limit_s=0.3).height >= problem.lower_bound


def test_progress_callback_receives_each_attempt():
    told = []
    auto.plan(problem_of((0, 2, 3), (1, 3, 5), (2, 5, 3), (0, 1, 4)), "bilevel", progress=told.append)
    auto.plan(problem_of((0, 2, 3)), progress=told.append)
    assert told[0] == "bilevel" and "search: fixed orders" in told


# -- streams -----------------------------------------------------------------------------------------------------------


def test_streams_without_orderings_share_no_bytes():
    problem = problem_of((0, 2, 8), (4, 6, 8), (0, 2, 3, 1), (4, 6, 3, 1))
    solution = auto.plan(problem)
    assert solution.height == 11 and solution.offsets[2] == solution.offsets[3]
    assert solution.offsets[0] == solution.offsets[1]


def test_multi_stream_solution_claims_optimality_only_at_the_lower_bound():
    solution = auto.plan(problem_of((0, 2, 8), (4, 6, 3, 1)))
    assert solution.height == 11 and not solution.optimal
    assert auto.plan(problem_of((0, 6, 8), (4, 6, 3, 1))).optimal


def test_streams_that_wait_for_each_other_share_bytes():
    rows = ((0, 2, 8), (2, 5, 8, 1), (6, 9, 8))
    assert auto.plan(problem_of(*rows)).height == 16
    # The side stream's request begins at the first wait and ends at the second.
    waits = [(2, 0, 1), (5, 1, 0)]
    assert auto.plan(problem_of(*rows, orderings=[(1, 0, 1), (6, 1, 0)])).height == 16, "the first wait comes too early"
    before = ((0, 2, 8), (3, 5, 8, 1), (6, 9, 8))
    assert auto.plan(problem_of(*before, orderings=[(3, 0, 1), (5, 1, 0)])).height == 8
    assert judge(problem_of(*rows, orderings=waits), auto.plan(problem_of(*rows, orderings=waits))) == ()


def test_waits_at_one_instant_take_effect_in_list_order():
    rows = ((0, 9, 50), (0, 2, 8, 1), (4, 6, 8, 2))
    for orderings, shared in ((((3, 1, 0), (3, 0, 2)), True), (((3, 0, 2), (3, 1, 0)), False)):
        problem = problem_of(*rows, orderings=orderings)
        solution = auto.plan(problem)
        assert judge(problem, solution) == () and is_valid(problem, solution)
        assert shared or solution.offsets[1] != solution.offsets[2]


@given(problem=problems(most=12, streams=4))
@settings(max_examples=100)
def test_single_stream_placement_expands_validly_to_several_streams(problem):
    blocks = on_one_stream(problem, lambda part: search.solve(part, improve=False).offsets)
    plain = blocks.problem
    offsets = blocks.expand(first_fit(Problem(buffers=_on_stream_0(plain.buffers)), list(range(len(plain)))).offsets)
    assert is_valid(problem, solved(problem, offsets, "test"))


def _on_stream_0(table: np.ndarray) -> np.ndarray:
    table = table.copy()
    table["stream"] = 0
    return table


# -- intervals ---------------------------------------------------------------------------------------------------------


@given(problem=problems(most=20, fewest=1, latest=30))
def test_renumbering_lifetimes_by_section_keeps_overlaps_and_peak(problem):
    table = problem.buffers
    lower, upper = sections(table)
    meets = (table["lower"][:, None] < table["upper"]) & (table["lower"] < table["upper"][:, None])
    assert np.array_equal(meets, (lower[:, None] < upper) & (lower < upper[:, None]))
    assert load_bytes(lower, upper, table["size"]).max() == problem.lower_bound
    first, last = instants(table)
    load = load_bytes(first, last, table["size"])
    assert load.max() == problem.lower_bound and len(load) >= len(load_bytes(lower, upper, table["size"]))
    largest = largest_within(load, first, last)
    assert largest.tolist() == [load[begin:end].max() for begin, end in zip(first, last, strict=True)]


def test_section_is_a_local_maximum_of_live_buffers():
    lower, upper = sections(problem_of((0, 5, 1), (1, 3, 1), (2, 4, 1), (4, 9, 1), (5, 6, 1)).buffers)
    assert (lower.tolist(), upper.tolist()) == ([0, 0, 0, 1, 2], [2, 1, 1, 3, 3])
