"""Plans addresses for a recorded step, and makes the tables that the native arena reads. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path

import numpy as np

from memplug.arena import shared
from memplug.arena.plan import auto
from memplug.arena.plan.changed import with_longer
from memplug.arena.plan.dynamic import Key, dynamic_peak_bytes, dynamic_spaces, renewed_spaces
from memplug.arena.plan.from_trace import last_step, problem_of
from memplug.arena.plan.part import AddressPlan, address_plan
from memplug.arena.plan.problem import Problem, Solution
from memplug.arena.plan.rooms import with_rooms
from memplug.arena.tables import MARGIN_BYTES, ArenaTables, tables_of
from memplug.profile.scaling import Inputs
from memplug.profile.trace import Trace
from memplug.profile.varying import observed, scales_as

AMENDING_S = 2.0
PLANNING_BYTES_PER_S = 64 << 20  # arena bytes per second of planning: a small arena can save little


def planned(
    trace: Trace, others: Sequence[Trace], planner: str, checks: bool, folder: Path | None = None, growth: float = 1.0
) -> tuple[AddressPlan, ArenaTables]:
    """Plan addresses for a recorded step.

    Args:
        trace: one step, recorded with requests.
        others: other steps of the same program; requests that differ in them are dynamic.
        planner: see `memplug.arena.plan.auto.plan`.
        checks: leave `MARGIN_BYTES` after each block.
        folder: a folder that the ranks share, see `memplug.arena.shared`; None: this process solves by itself.
        growth: how much larger than the recorded step's inputs those of later steps may be, at least 1.

    Raises:
        LayoutError: no planner found a plan that the judge accepts.
    """
    margin = MARGIN_BYTES if checks else 0
    step, others = observed(last_step(trace), others)
    # A validation's requests get reusable space instead of addresses, since the next step may have no validation.
    problem = problem_of(step, margin_bytes=margin, without_gradients=False)
    problem, hanging = with_rooms(problem, step, others, margin, _worth_s(problem, AMENDING_S))
    problem = with_longer(problem, _grown(step, others, growth), margin) or problem
    solution = shared.solve_once(problem, planner, _worth_s(problem, auto.TIME_LIMIT_S), folder)
    plan = plan_with_spaces(step, problem, solution, hanging, others)
    return plan, tables_of(plan)


def plan_with_spaces(
    step: Trace,
    problem: Problem,
    solution: Solution,
    hanging: frozenset[Key] = frozenset(),
    others: Sequence[Trace] = (),
) -> AddressPlan:
    """Return the plan of a step: its addresses, and the reusable space of its dynamic requests.

    Args:
        step: see `dynamic_spaces`.
        problem: see `dynamic_spaces`.
        solution: see `dynamic_spaces`.
        hanging: see `dynamic_spaces`.
        others: other recorded steps of the same program.
    """
    spaces = dynamic_spaces(step, problem, solution, hanging)
    live = max(_live_peak_bytes(each) for each in (step, *others))
    return address_plan(problem, solution, spaces, dynamic_peak_bytes(step), live)


def amended(plan: AddressPlan, planner: str) -> tuple[AddressPlan, ArenaTables]:
    """Plan the problem of `plan`, which has changed, again.

    Raises:
        LayoutError: see `planned`.
    """
    problem = plan.problem
    solution = auto.plan(problem, planner, time_limit_s=_worth_s(problem, AMENDING_S))
    spaces = renewed_spaces(plan.dynamic, problem, solution)
    seen = plan.predictions
    renewed = address_plan(problem, solution, spaces, seen.dynamic_peak_bytes, seen.live_peak_bytes)
    return renewed, tables_of(renewed)


def _grown(step: Trace, others: Sequence[Trace], growth: float) -> Inputs:
    """Return the sizes of a step's inputs, of which those that differ in another step are larger.

    If several dimensions differ, each is larger by a root, so that the inputs have `growth` times the elements.
    """
    own = step.fingerprint.input_sizes
    if growth == 1.0 or not all(scales_as(step, other) for other in others):
        return own
    found = []
    for micro_batch in zip(*(each.fingerprint.input_sizes for each in (step, *others)), strict=True):
        dimensions = [*zip(*micro_batch, strict=True)]  # of each, its size in the step and in the others
        changes = {sizes for sizes in dimensions if len(set(sizes)) > 1}  # ids and labels have the same dimensions
        each = growth ** (1 / max(1, len(changes)))
        found.append(tuple(ceil(each * sizes[0]) if sizes in changes else sizes[0] for sizes in dimensions))
    return tuple(found)


def _live_peak_bytes(step: Trace) -> int:
    """Return the most bytes that a step has in use at once, dynamic requests included."""
    every = replace(step, dynamic=np.zeros(len(step.requests), bool))
    return problem_of(every, without_gradients=False).lower_bound


def _worth_s(problem: Problem, longest_s: float) -> float:
    """Return the seconds that planning may take: in proportion to the arena, from 0.5 to `longest_s`."""
    return min(longest_s, max(0.5, problem.lower_bound / PLANNING_BYTES_PER_S))
