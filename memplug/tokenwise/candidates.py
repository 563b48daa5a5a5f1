"""Makes the plans to try: the same number on every rank, and the same plans on ranks with the same regions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from memplug.tokenwise.plan import memo, plain
from memplug.tokenwise.plan import solver as plan
from memplug.tokenwise.plan.cost import measure

LINK_FACTORS = (1.0, *(way for error in (1.1, 1.25, 1.5, 2.0, 3.0) for way in (1 / error, error)))
"""Factors that scale the link rates, for plans around the optimum: the time model errs most in the rate of a busy link.
A plan for a lower rate swaps less, a plan for a higher rate more."""


@dataclass(frozen=True, slots=True)
class SolveTask:
    """A problem for the planner, shared by all ranks with the same set of regions.

    Attributes:
        regions: the regions as this rank measured them; only the measurements of the rank `solver` count.
        budget: the smallest rates, host bytes and device bytes among the ranks that share the problem.
        fraction: MEMO's fraction, the smallest of all ranks; None: solve for plans around the optimum.
        most: maximum number of plans to try.
        solver: the rank that solves the problem for all that share it: of those with the largest step the lowest one.
    """

    regions: list[plan.PlannedRegion]
    budget: plan.Budget
    fraction: float | None
    most: int
    solver: int


def agree(
    own: tuple[list[plan.PlannedRegion], plan.Budget],
    gather: Callable[[Any], list[Any]],
    most: int = 1,
    alpha: Literal["auto", "memo"] = "auto",
    *,
    is_ready: bool = True,
    scale: float = 1.0,
    most_scale: float = math.inf,
) -> SolveTask | None:
    """Return this rank's problem to solve; None on every rank if any rank is not ready.

    Ranks may have observed steps of other sizes than that of the largest step, for which the plan is made. Then the
    problem is that of the rank whose step was the largest.

    Args:
        own: this rank's regions and budget.
        gather: collective that returns the arguments of all ranks, in rank order (`all_gather_object`).
        most: maximum number of plans to try, at least 1.
        alpha: "auto" for plans around the optimum, "memo" for one plan with MEMO's fraction.
        is_ready: False if this rank has regions, but none of them ran in the observed step.
        scale: by which `own` was scaled from this rank's observed step to the largest one.
        most_scale: the largest scale to plan from; if the least one of ranks with the same regions exceeds it, no rank
            is ready.
    """
    regions, budget = own
    mine = tuple(region.key for region in regions)
    if not all(gather(is_ready)):
        return None
    everyone: list[tuple[tuple[str, ...], plan.Budget, float]] = gather((mine, budget, scale))
    least: dict[tuple[str, ...], float] = {}
    for keys, _, others_scale in everyone:
        least[keys] = min(others_scale, least.get(keys, math.inf))
    if max(least.values()) > most_scale:
        return None
    budgets = [other for keys, other, _ in everyone if keys == mine]
    measured = [other for keys, other, others_scale in everyone if keys == mine and others_scale <= most_scale]
    shared = ("d2h_bytes_per_s", "h2d_bytes_per_s", "host_bytes")
    smallest = replace(
        budget,
        **{name: min(getattr(other, name) for other in budgets) for name in shared},
        device_bytes=min(other.device_bytes for other in measured),
        in_flight=_tightest([other.in_flight for other in measured]),
    )
    fraction = min(gather(memo.fraction_of(regions, smallest))) if alpha == "memo" else None
    solver = next(i for i, (keys, _, own_scale) in enumerate(everyone) if keys == mine and own_scale == least[mine])
    return SolveTask(regions, smallest, fraction, most, solver)


def _tightest(ranks: list[tuple[plan.InFlight, ...]]) -> tuple[plan.InFlight, ...]:
    """Merge the ranks' values of `Budget.in_flight`: at each time, take the smallest room of any rank.

    If ranks differ in how many regions are in flight, return a single time, with the largest count and no room.
    """
    if len({tuple(at.count for at in times) for times in ranks}) > 1:
        return (plan.InFlight(max(at.count for times in ranks for at in times)),)
    return tuple(min(same, key=lambda at: at.room_bytes) for same in zip(*ranks, strict=True))


def solve(task: SolveTask) -> list[plan.TokenwisePlan]:
    """Return the plans for a task; needs no other rank and no device.

    With MEMO's fraction, return one plan. Otherwise return, in this order:

    * the optimum;
    * the plan with as many plain regions (run as without memplug) as the device has room for; if it has room for none,
      the optimum again;
    * plans solved for slower and faster links, with their cost at the measured link rates.
    """
    regions, budget = task.regions, task.budget.with_buffers(task.regions)
    if task.fraction is not None:
        return [plan.solve(regions, budget, task.fraction)]
    optimum, *around = [_solve_around(regions, budget, factor) for factor in LINK_FACTORS[: task.most]]
    return [optimum, plain.solve_partly(regions, budget) or optimum, *around]


def choose(
    task: SolveTask, solved: list[plan.TokenwisePlan] | None, gather: Callable[[Any], list[Any]]
) -> list[plan.TokenwisePlan]:
    """Return the plans to try: the same number on every rank, and the same plans on ranks with the same regions.

    If every rank's device has room for all activations, the first plan runs all regions as without memplug. Next come
    the optimum and the plan with some plain regions; the one with the shorter predicted step is first. Plans for other
    link rates follow. A plan that equals an earlier one on all ranks is dropped.

    Args:
        task: from `agree`.
        solved: on the task's solver, the plans from `solve`; on other ranks None.
        gather: see `agree`.
    """
    by_rank = gather((task.solver, solved))
    plans = [by_rank[solver][1] for solver, _ in by_rank]  # each rank's plans, from its solver
    mine = by_rank[task.solver][1]
    if task.fraction is not None:
        return mine
    slowest_s = [max(of_rank[i].step_s for of_rank in plans) for i in (0, 1)]
    order = [*(sorted((0, 1), key=slowest_s.__getitem__)), *range(2, len(mine))]
    # among plans that are equal on all ranks, the earliest stays
    distinct = {str([_choices(of_rank[i]) for of_rank in plans]): i for i in reversed(order)}
    found = [mine[i] for i in order if i in distinct.values()]
    everything = plain.solve(task.regions, task.budget)
    if all(gather(everything is not None)):
        found.insert(0, everything)
    return found[: task.most]


def _solve_around(regions: list[plan.PlannedRegion], budget: plan.Budget, factor: float) -> plan.TokenwisePlan:
    """Solve for link rates that are scaled by `factor`; return the plan with its cost at the measured rates."""
    d2h, h2d = budget.d2h_bytes_per_s * factor, budget.h2d_bytes_per_s * factor
    solved = plan.solve(regions, replace(budget, d2h_bytes_per_s=d2h, h2d_bytes_per_s=h2d))
    groups = [solved.regions[region.key].groups for region in regions]
    return measure(regions, groups, budget, inputs_swapped=solved.inputs_swapped)


def _choices(solution: plan.TokenwisePlan) -> Any:
    """Return a plan's decisions, to compare plans; fractions are rounded, since tiny differences change no time."""
    return [
        (
            group.instances,
            group.plain,
            [(i, round(part, 2)) for i, part in sorted(group.fractions.items())],
            sorted(group.keep),
        )
        for _, region in sorted(solution.regions.items())
        for group in region.groups
    ]
