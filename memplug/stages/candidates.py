"""Plans to try, the same number on every rank and equal for equal regions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from memplug.plan import memo, plain
from memplug.plan import tokenwise as plan
from memplug.plan.tokenwise_model import measure

LINK_FACTORS = tuple(1.25**power for power in (0, -1, 1, -2, 2, -3, 3, -4, 4, -5, 5))
"""Of the link rates, for plans around the optimum: what a busy link gives is the largest error of the time model. At a
lower rate a plan swaps less, at a higher one more."""


def agree(
    own: tuple[list[plan.Region], plan.Budget],
    gather: Callable[[Any], list[Any]],
    most: int = 1,
    alpha: Literal["auto", "memo"] = "auto",
) -> list[plan.TokenwisePlan]:
    """Plans to choose from, the one that should be the fastest first: as many on every rank, equal for equal regions.

    Every rank solves with the smallest budgets of all ranks that share its set of regions, and takes the solutions of
    the lowest of them. Where the device of every rank has room for everything, the first is to run as without memplug.
    Another one lets as many regions as there is room for do so: it comes before or after the optimum, whichever should
    be faster. The last are solved as if the link were slower or faster, and told what they cost at its measured rate.
    One that is on all ranks the same as an earlier one is left out.

    Args:
        own: this rank's regions and budget.
        gather: returns what every rank passed, in rank order (`all_gather_object`); called by all ranks alike.
        most: how many, at least 1.
        alpha: "memo" for the one plan of MEMO's fraction, the smallest of all ranks.

    Returns:
        The plans; none, on every rank, where one has no regions to plan yet.
    """
    regions, budget = own
    mine = tuple(region.key for region in regions)
    everyone: list[tuple[tuple[str, ...], plan.Budget]] = gather((mine, budget))
    if not all(keys for keys, _ in everyone):
        return []
    budgets = [other for keys, other in everyone if keys == mine]
    first = next(rank for rank, (keys, _) in enumerate(everyone) if keys == mine)
    smallest = plan.Budget(
        d2h_bytes_per_s=min(b.d2h_bytes_per_s for b in budgets),
        h2d_bytes_per_s=min(b.h2d_bytes_per_s for b in budgets),
        host_bytes=min(b.host_bytes for b in budgets),
        padding_bytes=budget.padding_bytes,
        device_bytes=min(b.device_bytes for b in budgets),
        buffers=budget.buffers,
    )
    swapping = smallest.with_buffers(regions)
    if alpha == "memo":
        fraction = min(gather(memo.fraction_of(regions, swapping)))
        return gather(plan.solve(regions, swapping, fraction))[first : first + 1]
    optimum, *around = [_solve_around(regions, swapping, factor) for factor in LINK_FACTORS[:most]]
    by_rank = gather([optimum, plain.solve_partly(regions, swapping) or optimum, *around])
    slowest_s = [max(plans[i].step_s for plans in by_rank) for i in (0, 1)]
    order = [*(sorted((0, 1), key=slowest_s.__getitem__)), *range(2, len(by_rank[0]))]
    # the earliest of those that are equal on all ranks
    distinct = {str([_choices(plans[i]) for plans in by_rank]): i for i in reversed(order)}
    found = [by_rank[first][i] for i in order if i in distinct.values()]
    everything = plain.solve(regions, smallest)
    if all(gather(everything is not None)):
        found.insert(0, everything)
    return found[:most]


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
