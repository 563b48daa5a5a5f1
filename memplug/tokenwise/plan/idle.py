"""Removes swaps and keeps that do not make the step shorter.

The solver may leave some in its plan, because it stops once the plan is within a small gap of the optimum.
"""

from __future__ import annotations

from collections.abc import Sequence

from memplug.tokenwise.plan.cost import amounts, chosen, measure, passes_s, together
from memplug.tokenwise.plan.model import (
    Budget,
    PlannedRegion,
    TokenwisePlan,
    group_of,
    part_bytes,
    passes_of,
    recompute_s,
)


def without_idle(regions: Sequence[PlannedRegion], plan: TokenwisePlan, budget: Budget) -> TokenwisePlan:
    """Return the plan without captures that do not make the step shorter: those outputs are recomputed instead.

    Outputs are tried one by one. The time of a try includes all further operators that recomputing the output needs.

    Args:
        regions: the regions that the plan is for, in any order.
        plan: a plan without plain groups.
        budget: the budget that the plan was made with.
    """
    groups = [list(plan.regions[region.key].groups) for region in regions]
    phases = amounts(regions, groups, budget, plan.inputs_swapped)
    step_s = sum(passes_s(*phases, budget))
    for region, parts in zip(regions, groups, strict=True):
        passes = passes_of(region.operators, region.given)
        for at, group in enumerate(parts):
            fractions, keep, runs = dict(group.fractions), set(group.keep), group.runs
            available = keep | {index for index, fraction in fractions.items() if fraction >= 1.0}
            for index in (*group.fractions, *sorted(group.keep)):
                operator, fraction = region.operators[index], fractions.get(index, 0.0)
                more, _ = passes.asked(region.saved, available - {index})  # operators that run if `index` is recomputed
                less = {i: part for i, part in fractions.items() if i != index}
                change = chosen(
                    budget,
                    recompute_s=recompute_s(region.operators, more, less)
                    - recompute_s(region.operators, runs, fractions),
                    swapped_bytes=-part_bytes(operator.output_bytes, operator.rows, fraction),
                    swapped_tensors=0,  # their number adds only padding, which takes no time
                    kept_bytes=-operator.output_bytes if index in keep else 0,
                )
                every = together(change, group.instances, region.staying if at == len(parts) - 1 else 0)
                first, last = phases
                first, last = (first.plus(every), last) if at == 0 else (first, last.plus(every))
                if (tried_s := sum(passes_s(first, last, budget))) <= step_s:
                    phases, step_s = (first, last), tried_s
                    fractions.pop(index, None)
                    keep.discard(index)
                    runs = more
                    available.discard(index)
            parts[at] = group_of(region, group.instances, fractions, keep)
    return measure(regions, groups, budget, inputs_swapped=plan.inputs_swapped)
