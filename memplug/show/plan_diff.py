"""The differences between two memory plans, as one object of plain values, and that object in words."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from memplug.figures.words import Rows
from memplug.plans.schema import MemoryPlan
from memplug.show.techniques import in_place


def diff(a: MemoryPlan, b: MemoryPlan) -> dict[str, Any]:
    """Return the differences for `memplug diff --json`: plain values under stable keys that name their units.

    Each technique compares its parts of the two plans.
    """
    facts: dict[str, Any] = {
        side: {"fingerprint_digest": plan.fingerprint.digest()} for side, plan in (("a", a), ("b", b))
    }
    prints = zip(asdict(a.fingerprint).items(), asdict(b.fingerprint).values(), strict=True)
    facts["fingerprint"] = {name: {"a": of_a, "b": of_b} for (name, of_a), of_b in prints if of_a != of_b}
    for each in in_place():
        facts["a"] |= each.side(a)
        facts["b"] |= each.side(b)
        facts |= each.diff(a, b)
    return facts


def rows(facts: dict[str, Any]) -> Rows:
    """Return the result of `diff` as (name, value) in words."""
    fingerprint = [
        (f"other {name}", f"{_value(sides['a'])} in A, {_value(sides['b'])} in B")
        for name, sides in facts["fingerprint"].items()
    ]
    return [
        *(fingerprint or [("recorded from", "the same program, on the same kind of machine")]),
        *(row for each in in_place() for row in each.diff_rows(facts)),
    ]


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(" ".join(each) if isinstance(each, list | tuple) else str(each) for each in value) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value) or "unknown"
