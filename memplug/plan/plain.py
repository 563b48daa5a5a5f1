"""Out of the way: where the device has room for all that backward asks for, regions run as without memplug."""

from __future__ import annotations

from collections.abc import Sequence

from memplug.plan.tokenwise_model import Budget, Group, Region, TokenwisePlan, measure


def solve(regions: Sequence[Region], budget: Budget) -> TokenwisePlan | None:
    """The plan that keeps everything and recomputes nothing; None where the device has no room for it, or a region's
    saved bytes are unknown.

    Args:
        regions: every kind of region of the step, once each.
        budget: its device bytes count; the inputs, which the observed step swapped, stay there too.
    """
    if not all(region.saved_bytes for region in regions):
        return None
    groups = [[_group(region)] for region in regions]
    solution = measure(regions, groups, budget, inputs_swapped=False)
    return solution if solution.device_bytes <= budget.device_bytes else None


def _group(region: Region) -> Group:
    return Group(
        instances=region.instances,
        fractions={},
        keep=frozenset(),
        runs=frozenset(),
        swapped_bytes=0,
        kept_bytes=region.saved_bytes + region.input_bytes,
        recompute_s=0.0,
        plain=True,
    )
