"""Plans to try, the same number on every rank and equal for equal regions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from memplug.tokenwise.plan import memo, plain
from memplug.tokenwise.plan import solver as plan
from memplug.tokenwise.plan.cost import measure

LINK_FACTORS = (1.0, *(way for error in (1.1, 1.25, 1.5, 2.0, 3.0) for way in (1 / error, error)))
"""Of the link rates, for plans around the optimum: what a busy link gives is the largest error of the time model. At a
lower rate a plan swaps less, at a higher one more."""


@dataclass(frozen=True, slots=True)
class Task:
    """What ranks that share a set of regions are to solve.

    Attributes:
        regions: as the rank measured them that solves.
        budget: the smallest of all of these ranks.
        fraction: MEMO's, the smallest of all ranks; None: the plans around the optimum.
        most: how many plans at most.
        solver: the lowest of these ranks, which solves for all of them.
    """

    regions: list[plan.Region]
    budget: plan.Budget
    fraction: float | None
    most: int
    solver: int


def agree(
    own: tuple[list[plan.Region], plan.Budget],
    gather: Callable[[Any], list[Any]],
    most: int = 1,
    alpha: Literal["auto", "memo"] = "auto",
) -> Task | None:
    """What to solve; None, on every rank, where one has no regions to plan yet.

    Args:
        own: this rank's regions and budget.
        gather: returns what every rank passed, in rank order (`all_gather_object`); called by all ranks alike.
        most: how many plans to choose from, at least 1.
        alpha: "memo" for the one plan of MEMO's fraction.
    """
    regions, budget = own
    mine = tuple(region.key for region in regions)
    everyone: list[tuple[tuple[str, ...], plan.Budget]] = gather((mine, budget))
    if not all(keys for keys, _ in everyone):
        return None
    budgets = [other for keys, other in everyone if keys == mine]
    shared = ("d2h_bytes_per_s", "h2d_bytes_per_s", "host_bytes", "device_bytes")
    smallest = replace(
        budget,
        **{name: min(getattr(other, name) for other in budgets) for name in shared},
        in_flight=_tightest([other.in_flight for other in budgets]),
    )
    fraction = min(gather(memo.fraction_of(regions, smallest))) if alpha == "memo" else None
    solver = next(rank for rank, (keys, _) in enumerate(everyone) if keys == mine)
    return Task(regions, smallest, fraction, most, solver)


def _tightest(ranks: list[tuple[plan.InFlight, ...]]) -> tuple[plan.InFlight, ...]:
    """What holds for all ranks; those whose steps differ have no room that all of them know of."""
    if len({tuple(at.count for at in times) for times in ranks}) > 1:
        return (plan.InFlight(max(at.count for times in ranks for at in times)),)
    return tuple(min(same, key=lambda at: at.room_bytes) for same in zip(*ranks, strict=True))


def solve(task: Task) -> list[plan.TokenwisePlan]:
    """The optimum; the plan by which as many regions as there is room for run as without memplug; and plans solved as
    if the link were slower or faster, told what they cost at its measured rate. Or the one of MEMO's fraction. Touches
    no rank and no device.
    """
    regions, budget = task.regions, task.budget.with_buffers(task.regions)
    if task.fraction is not None:
        return [plan.solve(regions, budget, task.fraction)]
    optimum, *around = [_solve_around(regions, budget, factor) for factor in LINK_FACTORS[: task.most]]
    return [optimum, plain.solve_partly(regions, budget) or optimum, *around]


def choose(
    task: Task, solved: list[plan.TokenwisePlan] | None, gather: Callable[[Any], list[Any]]
) -> list[plan.TokenwisePlan]:
    """Plans to choose from, the one that should be the fastest first: as many on every rank, equal for equal regions.

    Where the device of every rank has room for everything, the first is to run as without memplug. Of the optimum and
    the plan that lets some regions do so, the one that should be faster comes first. One that is on all ranks the same
    as an earlier one is left out.

    Args:
        task: from `agree`.
        solved: by `solve`, on the rank that does; else None.
        gather: as in `agree`.
    """
    by_rank = gather((task.solver, solved))
    plans = [by_rank[solver][1] for solver, _ in by_rank]  # of each rank, by the one that solved for it
    mine = by_rank[task.solver][1]
    if task.fraction is not None:
        return mine
    slowest_s = [max(of_rank[i].step_s for of_rank in plans) for i in (0, 1)]
    order = [*(sorted((0, 1), key=slowest_s.__getitem__)), *range(2, len(mine))]
    # the earliest of those that are equal on all ranks
    distinct = {str([_choices(of_rank[i]) for of_rank in plans]): i for i in reversed(order)}
    found = [mine[i] for i in order if i in distinct.values()]
    everything = plain.solve(task.regions, task.budget)
    if all(gather(everything is not None)):
        found.insert(0, everything)
    return found[: task.most]


def _solve_around(regions: list[plan.Region], budget: plan.Budget, factor: float) -> plan.TokenwisePlan:
    """The plan for links of `factor` times the rate, and what it costs at their own rate."""
    d2h, h2d = budget.d2h_bytes_per_s * factor, budget.h2d_bytes_per_s * factor
    solved = plan.solve(regions, replace(budget, d2h_bytes_per_s=d2h, h2d_bytes_per_s=h2d))
    groups = [solved.regions[region.key].groups for region in regions]
    return measure(regions, groups, budget, inputs_swapped=solved.inputs_swapped)


def _choices(solution: plan.TokenwisePlan) -> Any:
    """What a plan does, fractions to a hundredth: what differs by less takes the same time."""
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
