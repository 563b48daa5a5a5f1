"""Plans under which all regions, or only the last ones, run as without memplug.

If the device has room for every tensor that backward asks for, all regions run in this way. If it has room for only
some of these tensors, the last regions do, because their tensors live shortest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memplug.tokenwise.plan import solver as tokenwise
from memplug.tokenwise.plan.cost import measure
from memplug.tokenwise.plan.model import Budget, Group, PlannedRegion, TokenwisePlan


def solve(regions: Sequence[PlannedRegion], budget: Budget) -> TokenwisePlan | None:
    """Return the plan that keeps everything and recomputes nothing.

    Args:
        regions: every kind of region of the step, once each.
        budget: only its device bytes count. They also have to hold the regions' inputs, which the observed step
            swapped.

    Returns:
        The plan; None if the device has no room for it, or a region's saved bytes are unknown.
    """
    if not all(region.saved_bytes for region in regions):
        return None
    groups = [[_group(region, region.instances)] for region in regions]
    solution = measure(regions, groups, budget, inputs_swapped=False)
    return solution if solution.device_bytes <= budget.device_bytes else None


def solve_partly(regions: Sequence[PlannedRegion], budget: Budget) -> TokenwisePlan | None:
    """Return the plan with as many plain instances as the device can hold; these run as without memplug.

    The last instances of each region are plain, the same share in every region. All other instances are planned within
    the device bytes that remain.

    Args:
        regions: every kind of region of the step, once each.
        budget: link rates, host bytes and device bytes.

    Returns:
        The plan; None if the device cannot hold even one plain instance, or a region's saved bytes are unknown.
    """
    if not all(region.saved_bytes for region in regions):
        return None
    most = max((region.instances for region in regions), default=0)
    for last in range(most - 1, 0, -1):
        sizes = [last * region.instances // most for region in regions]
        room_bytes = budget.device_bytes - sum(
            (size + region.staying) * region.saved_bytes for size, region in zip(sizes, regions, strict=True) if size
        )
        if room_bytes >= 0:
            return _beside(regions, sizes, replace(budget, device_bytes=room_bytes))
    return None


def _beside(regions: Sequence[PlannedRegion], sizes: Sequence[int], budget: Budget) -> TokenwisePlan:
    """Return the plan in which the last `sizes` instances of each region are plain; the solver decides on the rest."""
    rest = [
        replace(region, instances=region.instances - size, staying=0 if size else region.staying)
        for size, region in zip(sizes, regions, strict=True)
    ]
    planned = tokenwise.solve(rest, budget)
    groups = [
        [*planned.regions[region.key].groups, *([_group(region, size)] if size else [])]
        for size, region in zip(sizes, regions, strict=True)
    ]
    return measure(regions, groups, budget, inputs_swapped=planned.inputs_swapped)


def _group(region: PlannedRegion, instances: int) -> Group:
    return Group(
        instances=instances,
        fractions={},
        keep=frozenset(),
        runs=frozenset(),
        swapped_bytes=0,
        kept_bytes=region.saved_bytes,
        recompute_s=0.0,
        plain=True,
    )


def is_plain(solution: TokenwisePlan) -> bool:
    """Return whether all regions run as without memplug."""
    return all(group.plain for region in solution.regions.values() for group in region.groups)
