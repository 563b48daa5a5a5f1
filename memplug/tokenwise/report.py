"""A plan of decisions, for people."""

from __future__ import annotations

from memplug.tokenwise.plan.model import TokenwisePlan
from memplug.tokenwise.plan.plain import is_plain
from memplug.words import size


def plan_in_words(solution: TokenwisePlan) -> str:
    """A plan in one line."""
    if is_plain(solution):
        return f"planned: the device has room for {size(solution.kept_bytes)} more: regions run as without memplug"
    swapped = sum(region.swapped_bytes for region in solution.regions.values())
    recompute_s = sum(region.recompute_s for region in solution.regions.values())
    bound = solution.bound if solution.alpha is None else f"{solution.bound}, at alpha {solution.alpha:.3f}"
    return (
        f"planned: {size(swapped)} of outputs swapped and {size(solution.kept_bytes)} kept a step, "
        f"{recompute_s:.3f} s recomputed, {size(solution.host_bytes)} of host memory, bound by {bound}"
    )
