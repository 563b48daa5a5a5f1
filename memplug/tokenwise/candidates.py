"""Makes the plans to try: as many on every rank, and the same plans on ranks with the same regions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from memplug.tokenwise.plan import memo, plain
from memplug.tokenwise.plan import solver as plan
from memplug.tokenwise.plan.cost import measure

LINK_FACTORS = (1.0, *(way for error in (1.1, 1.25, 1.5, 2.0, 3.0) for way in (1 / error, error)))
"""Factors of the link rates that give plans around the optimum: the time model errs most in the rate of a busy link. A
plan for a lower rate swaps less, a plan for a higher rate more."""


@dataclass(frozen=True, slots=True)
class SolveTask:
    """A problem for the planner, shared by all ranks with the same set of regions.

    Attributes:
        regions: the regions as this rank measured them; the planner gets those of the rank that solves.
        budget: the smallest rates, host bytes and device bytes of these ranks.
        fraction: MEMO's fraction, the smallest of all ranks; None: solve for plans around the optimum.
        most: the largest number of plans.
        solver: the lowest of these ranks, which solves for all of them.
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
) -> SolveTask | None:
    """Return the problem to solve; None, on every rank, while a rank is not ready.

    Args:
        own: this rank's regions and budget.
        gather: returns what each rank passed to it, in rank order (`all_gather_object`); all ranks call it together.
        most: the largest number of plans to choose from, at least 1.
        alpha: "memo" for the one plan of MEMO's fraction.
        is_ready: False if this rank has regions, and none of them ran in the step to plan from.
    """
    regions, budget = own
    mine = tuple(region.key for region in regions)
    if not all(gather(is_ready)):
        return None
    everyone: list[tuple[tuple[str, ...], plan.Budget]] = gather((mine, budget))
    budgets = [other for keys, other in everyone if keys == mine]
    shared = ("d2h_bytes_per_s", "h2d_bytes_per_s", "host_bytes", "device_bytes")
    smallest = replace(
        budget,
        **{name: min(getattr(other, name) for other in budgets) for name in shared},
        in_flight=_tightest([other.in_flight for other in budgets]),
    )
    fraction = min(gather(memo.fraction_of(regions, smallest))) if alpha == "memo" else None
    solver = next(rank for rank, (keys, _) in enumerate(everyone) if keys == mine)
    return SolveTask(regions, smallest, fraction, most, solver)


def _tightest(ranks: list[tuple[plan.InFlight, ...]]) -> tuple[plan.InFlight, ...]:
    """Return the times that hold for all ranks, each with the smallest room of a rank.

    If the counts of the times differ between ranks, return one time with the largest count and without room.
    """
    if len({tuple(at.count for at in times) for times in ranks}) > 1:
        return (plan.InFlight(max(at.count for times in ranks for at in times)),)
    return tuple(min(same, key=lambda at: at.room_bytes) for same in zip(*ranks, strict=True))


def solve(task: SolveTask) -> list[plan.TokenwisePlan]:
    """Return the plans for a task; needs no other rank and no device.

    For "auto" they are, in order:

    * the optimum;
    * the plan that runs as many regions as without memplug as the device has room for; the optimum again if it has room
      for none;
    * plans that are solved for a slower or faster link, with their cost at the measured rates.

    For MEMO's fraction there is one plan.
    """
    regions, budget = task.regions, task.budget.with_buffers(task.regions)
    if task.fraction is not None:
        return [plan.solve(regions, budget, task.fraction)]
    optimum, *around = [_solve_around(regions, budget, factor) for factor in LINK_FACTORS[: task.most]]
    return [optimum, plain.solve_partly(regions, budget) or optimum, *around]


def choose(
    task: SolveTask, solved: list[plan.TokenwisePlan] | None, gather: Callable[[Any], list[Any]]
) -> list[plan.TokenwisePlan]:
    """Return the plans to try: as many on every rank, and the same plans on ranks with the same regions.

    If the device of every rank has room for everything, the first plan runs all regions as without memplug. The optimum
    and the plan that runs some regions so follow, the one with the shorter predicted step first, and then the plans for
    other link rates. A plan that equals an earlier one on all ranks is left out.

    Args:
        task: from `agree`.
        solved: from `solve`, on the rank that solves; else None.
        gather: as in `agree`.
    """
    by_rank = gather((task.solver, solved))
    plans = [by_rank[solver][1] for solver, _ in by_rank]  # plans of each rank, from the rank that solved for it
    mine = by_rank[task.solver][1]
    if task.fraction is not None:
        return mine
    slowest_s = [max(of_rank[i].step_s for of_rank in plans) for i in (0, 1)]
    order = [*(sorted((0, 1), key=slowest_s.__getitem__)), *range(2, len(mine))]
    # of plans that are equal on all ranks, the earliest
    distinct = {str([_choices(of_rank[i]) for of_rank in plans]): i for i in reversed(order)}
    found = [mine[i] for i in order if i in distinct.values()]
    everything = plain.solve(task.regions, task.budget)
    if all(gather(everything is not None)):
        found.insert(0, everything)
    return found[: task.most]


def _solve_around(regions: list[plan.PlannedRegion], budget: plan.Budget, factor: float) -> plan.TokenwisePlan:
    """Return the plan for a link of `factor` times the rates, with its cost at the measured rates."""
    d2h, h2d = budget.d2h_bytes_per_s * factor, budget.h2d_bytes_per_s * factor
    solved = plan.solve(regions, replace(budget, d2h_bytes_per_s=d2h, h2d_bytes_per_s=h2d))
    groups = [solved.regions[region.key].groups for region in regions]
    return measure(regions, groups, budget, inputs_swapped=solved.inputs_swapped)


def _choices(solution: plan.TokenwisePlan) -> Any:
    """Return a plan's choices, with fractions rounded to a hundredth: plans that differ by less take the same time."""
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
