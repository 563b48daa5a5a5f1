"""Shows the swap list of a plan in words. Imports no torch."""

from __future__ import annotations

from collections import Counter
from typing import Any

from memplug.figures.technique_picture import TechniquePicture
from memplug.figures.words import Rows
from memplug.plans.schema import MemoryPlan
from memplug.swap.plan.part import SwapPart
from memplug.words import count, duration, size

_LARGEST = 4


class SwapPicture(TechniquePicture):
    """Describes the swap list in words; it has no figure."""

    place = 2

    def facts(self, plan: MemoryPlan) -> dict[str, Any]:
        """Return the list's facts, under "swap_list"; see `TechniquePicture.facts`."""
        return {"swap_list": swaps(plan)}

    def rows(self, facts: dict[str, Any]) -> Rows:
        """Return these facts as rows of words; see `TechniquePicture.rows`."""
        return rows(facts["swap_list"]) if facts["swap_list"] else []


PICTURE = SwapPicture()


def swaps(plan: MemoryPlan) -> dict[str, Any] | None:
    """Return the facts of a plan's swap list by name, as `memplug show --json` prints them.

    Returns:
        None if the plan has no list, or its step fits without a list.
    """
    part = SwapPart.of(plan)
    if part is None or not (part.targets or part.impossible):
        return None
    by_operator: Counter[str] = Counter()
    for target in part.targets:
        by_operator[target.operator] += target.nbytes
    return {
        "tensors": len(part.targets),
        "swapped_bytes": part.swapped_bytes,
        "state_bytes": part.state_bytes,
        "host_bytes": part.host_bytes,
        "peak_bytes": part.predicted_peak_bytes,
        "stall_s": part.predicted_stall_s,
        "step_s": part.predicted_step_s,
        "bytes_by_last_operator": dict(by_operator.most_common()),
        "impossible": part.impossible,
    }


def rows(facts: dict[str, Any]) -> Rows:
    """Return the facts of `swaps` as (name, value) in words."""
    if facts["impossible"]:
        return [("swap list", f"there is none: {facts['impossible']}")]
    operators = [
        f"{size(nbytes)} after {operator or 'the previous step'}"
        for operator, nbytes in facts["bytes_by_last_operator"].items()
    ]
    more = [f"{count(len(operators) - _LARGEST, 'other')}"] if len(operators) > _LARGEST else []
    return [
        ("swap list", f"{count(facts['tensors'], 'tensor')}, {size(facts['swapped_bytes'])} away between two uses"),
        ("  they leave", ", ".join([*operators[:_LARGEST], *more])),
        ("  predicted peak", f"{size(facts['peak_bytes'])} on the device, {size(facts['host_bytes'])} of host memory"),
        ("  waiting", f"{duration(facts['stall_s'])} of a step of {duration(facts['step_s'])}"),
    ]
