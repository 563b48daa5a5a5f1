"""A memory plan as one object of plain values, and that object in words; each technique contributes its part."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from memplug.figures.words import Rows
from memplug.plans.schema import MemoryPlan
from memplug.show.summary import recorded_rows
from memplug.show.techniques import in_place


def summary(plan: MemoryPlan) -> dict[str, Any]:
    """Return a plan's facts for `memplug show --json`: plain values under stable keys that name their units."""
    facts = {"fingerprint": {"digest": plan.fingerprint.digest(), **asdict(plan.fingerprint)}}
    for each in in_place():
        facts |= each.facts(plan)
    return facts


def rows(facts: dict[str, Any]) -> Rows:
    """Return the result of `summary` as (name, value) in words."""
    return [*recorded_rows(facts["fingerprint"]), *(row for each in in_place() for row in each.rows(facts))]
