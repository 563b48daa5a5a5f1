"""From a recorded step to what the arena serves by: addresses, as a plan and as tables. Knows no torch."""

from __future__ import annotations

from pathlib import Path

from memplug.arena import shared
from memplug.arena.plan import auto
from memplug.arena.plan.dynamic import dynamic_peak_bytes, dynamic_spaces, renewed_spaces
from memplug.arena.plan.from_trace import last_step, problem_of
from memplug.arena.plan.part import AddressPlan, address_plan
from memplug.arena.plan.problem import Problem, Solution
from memplug.arena.tables import MARGIN_BYTES, Tables, tables_of
from memplug.profile.trace import Trace

AMENDING_S = 2.0
PLANNING_BYTES_PER_S = 64 << 20  # of an arena: the smaller it is, the less time is its plan worth


def planned(trace: Trace, planner: str, checks: bool, folder: Path | None = None) -> tuple[AddressPlan, Tables]:
    """A plan of the last step of a trace.

    Args:
        trace: of at least one step, with requests.
        planner: see `memplug.arena.plan.auto.plan`.
        checks: leave `MARGIN_BYTES` after each block.
        folder: that ranks share; see `memplug.arena.shared`.

    Raises:
        LayoutError: no plan that the judge accepts was found.
    """
    step = last_step(trace)
    # a validation in this step may not come in the next: it is served from reusable space instead
    problem = problem_of(step, margin_bytes=MARGIN_BYTES if checks else 0, without_gradients=False)
    solution = shared.solve_once(problem, planner, _worth_s(problem, auto.TIME_LIMIT_S), folder)
    plan = plan_with_spaces(step, problem, solution)
    return plan, tables_of(plan)


def plan_with_spaces(step: Trace, problem: Problem, solution: Solution) -> AddressPlan:
    """The plan of a step: its addresses, and what its dynamic requests may reuse; the arguments are those of
    `dynamic_spaces`.
    """
    return address_plan(problem, solution, dynamic_spaces(step, problem, solution), dynamic_peak_bytes(step))


def amended(plan: AddressPlan, problem: Problem, planner: str) -> tuple[AddressPlan, Tables]:
    """The plan with the lifetimes of another problem of the same requests.

    Raises:
        LayoutError: as in `planned`.
    """
    solution = auto.plan(problem, planner, time_limit_s=_worth_s(problem, AMENDING_S))
    spaces = renewed_spaces(plan.dynamic, problem, solution)
    renewed = address_plan(problem, solution, spaces, plan.predictions.dynamic_peak_bytes)
    return renewed, tables_of(renewed)


def _worth_s(problem: Problem, longest_s: float) -> float:
    """Seconds that a plan may take: what they can save is a share of the arena's bytes."""
    return min(longest_s, max(0.5, problem.lower_bound / PLANNING_BYTES_PER_S))
