"""MEMO's plans: the same fraction of every tensor is swapped (MEMO, section 4.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from memplug.tokenwise.plan.cost import measure, swapped_tensors
from memplug.tokenwise.plan.model import Budget, PlannedRegion, TokenwisePlan, group_of, needed


def alpha_of_layer(
    input_bytes: float,
    attention_bytes: float,
    other_bytes: float,
    layers: int,
    d2h_bytes_per_s: float,
    layer_forward_s: float,
    host_bytes: float,
) -> float:
    """Return MEMO's alpha in closed form (section 4.1).

    Alpha is the largest fraction whose copies fit into one layer's forward and whose bytes fit into host memory. The
    bytes are those of all layers but the last two.

    Returns:
        The fraction, in [0, 1]; 0 if not even input and attention output fit.
    """
    by_link = (d2h_bytes_per_s * layer_forward_s - input_bytes - attention_bytes) / other_bytes
    by_host = (host_bytes / max(layers - 2, 1) - input_bytes - attention_bytes) / other_bytes
    return min(max(min(by_link, by_host), 0.0), 1.0)


def fraction_of(regions: Sequence[PlannedRegion], budget: Budget) -> float:
    """Return the largest fraction whose copies fit into each region's forward (MEMO, section 4.1).

    Host memory does not count here; `fixed` lowers the fraction to fit it.
    """
    fractions = [1.0]
    for region in regions:
        whole, rows = _parts(region)
        whole_bytes, rows_bytes = (sum(region.operators[i].output_bytes for i in part) for part in (whole, rows))
        if rows_bytes:
            rate = budget.d2h_bytes_per_s
            fractions.append(
                alpha_of_layer(
                    region.input_bytes, whole_bytes, rows_bytes, 1, rate, region.forward_s, host_bytes=math.inf
                )
            )
    return min(fractions)


def _parts(region: PlannedRegion) -> tuple[set[int], set[int]]:
    """Return the indices of the operators that MEMO swaps whole, and of those that it swaps by rows."""
    capturable = {i for i, operator in enumerate(region.operators) if operator.capturable}
    always = {i for i in capturable if region.operators[i].always_swapped}
    live = needed(region.operators, region.saved, region.given, always)
    return always, {i for i in live & capturable - always if region.operators[i].capture == "rows"}


def fixed(
    regions: Sequence[PlannedRegion], budget: Budget, alpha: float, room_bytes: int, inputs_swapped: bool
) -> TokenwisePlan:
    """Return MEMO's plan for the fraction `alpha`, which is lowered to fit host memory.

    Alpha 0 still swaps attention outputs. If the host has no room even for these, every operator is recomputed.

    Args:
        regions: every kind of region of the step, once each.
        budget: link rates, host bytes and device bytes.
        alpha: the requested fraction, in [0, 1].
        room_bytes: host memory that the regions' inputs leave free.
        inputs_swapped: see `TokenwisePlan`.
    """
    whole, rows = map(list, zip(*map(_parts, regions), strict=True)) if regions else ([], [])
    whole_bytes, rows_bytes = (
        sum(r.instances * r.operators[i].output_bytes for r, chosen in zip(regions, part, strict=True) for i in chosen)
        for part in (whole, rows)
    )
    padding_bytes = budget.padding_bytes * sum(
        r.instances * swapped_tensors(r, (*always, *some)) for r, always, some in zip(regions, whole, rows, strict=True)
    )
    left_bytes = room_bytes - whole_bytes - padding_bytes
    cut = left_bytes < 0 or alpha * rows_bytes > left_bytes
    if left_bytes < 0:
        alpha, whole = 0.0, [set() for _ in regions]
    elif cut:
        alpha = left_bytes / rows_bytes * (1.0 - 1e-12)  # slightly less: rounding must not exceed `left_bytes`
    groups = [
        [group_of(region, region.instances, dict.fromkeys(always, 1.0) | dict.fromkeys(some, float(alpha)), ())]
        for region, always, some in zip(regions, whole, rows, strict=True)
    ]
    return measure(regions, groups, budget, inputs_swapped=inputs_swapped, alpha=float(alpha), alpha_cut_by_host=cut)
