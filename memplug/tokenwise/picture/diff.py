"""Compares the decisions of two plans in plain values, and puts these values into words."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

from memplug.figures.groups import layer_words
from memplug.figures.words import Rows, both, change
from memplug.plans.schema import MemoryPlan
from memplug.tokenwise.picture.decisions import (
    KINDS,
    OPERATORS,
    bound_words,
    decisions,
    region_words,
    short_region_names,
)
from memplug.tokenwise.plan.decisions import Decisions, Setting
from memplug.words import count, duration, known, size

_ROWS_AT_MOST = 8
_OF_A_PLAN = ("step_s", "full_recomputation_s", "peak_bytes", "host_bytes", "device_bytes", "bound", "run")


def diff(a: MemoryPlan, b: MemoryPlan) -> dict[str, Any] | None:
    """Return the differences between two plans' decisions and predictions.

    A region counts as changed if the plans' decisions for its operators differ, if only one plan swaps its input, or if
    only one runs it as without memplug. If only bytes differ, as with another size of micro-batch, it is not changed.

    Returns:
        The differences as plain values; None if neither plan has decisions. "a" and "b" are the totals of each plan,
            None for a plan without decisions. "changed" lists the changed regions; there "a" and "b" are the decisions
            of each plan, None for a plan that lacks the region.
    """
    plans = {"a": a, "b": b}
    sides = {side: decisions(plan) for side, plan in plans.items()}
    if not any(sides.values()):
        return None
    settings = {side: Decisions.of(plan).settings if sides[side] else {} for side, plan in plans.items()}
    regions = {side: {each["name"]: each for each in its["regions"]} if its else {} for side, its in sides.items()}
    names = dict.fromkeys([*regions["a"], *regions["b"]])
    changed = []
    for name in names:
        mine, its = (settings[side].get(name) for side in "ab")
        if mine is None or its is None or _chosen(mine) != _chosen(its):
            each = {"name": name, "changed_operators": _changed_operators(mine, its)}
            changed.append({**each, **{side: regions[side].get(name) for side in "ab"}})
    totals = (*(f"{kind}_bytes" for kind in KINDS), *OPERATORS, "plain_regions", *_OF_A_PLAN)
    return {
        **{side: {name: its[name] for name in totals} if its else None for side, its in sides.items()},
        "regions": len(names),
        "changed_regions": len(changed),
        "changed": changed,
    }


def rows(facts: dict[str, Any]) -> Rows:
    """Return the result of `diff` as rows (name, value), in words."""
    a, b = facts["a"], facts["b"]

    def amounts(name: str, words: Callable[[Any], str]) -> str:
        return change(a[name], b[name], words) if a and b else known((a or b)[name], words)

    bounds = [bound_words(side["bound"]) for side in (a, b) if side]
    return [
        ("decisions", _changed_words(facts)),
        *(_changed_rows(facts["changed"]) if a and b else []),
        *((f"  {kind}", amounts(f"{kind}_bytes", size)) for kind in KINDS),
        ("predicted step", amounts("step_s", duration)),
        ("predicted peak", amounts("peak_bytes", size)),
        ("host memory", amounts("host_bytes", size)),
        ("bound by", both(*bounds) if a and b else bounds[0]),
    ]


def _chosen(setting: Setting) -> tuple:
    """Return a region's decisions in a form to compare, without the bytes that follow from them."""
    plain = setting.plain_bytes is not None
    return plain, (setting.swaps_input and not plain), setting.plan or {}


def _changed_operators(a: Setting | None, b: Setting | None) -> int:
    """Return the number of operators whose decision differs, or that have a decision in one setting only."""
    mine, its = ((setting.plan or {}) if setting else {} for setting in (a, b))
    return sum(mine.get(index) != its.get(index) for index in mine.keys() | its.keys())


def _changed_words(facts: dict[str, Any]) -> str:
    if facts["a"] is None or facts["b"] is None:
        return f"only in {'A' if facts['a'] else 'B'}, of {count(facts['regions'], 'region')}"
    if not facts["changed_regions"]:
        return "the same in both"
    return f"changed in {facts['changed_regions']:,} of {count(facts['regions'], 'region')}"


def _changed_rows(changed: list[dict[str, Any]]) -> Rows:
    """Return lines for changed regions, up to a limit; neighbours with the same change share a line."""
    short = short_region_names(each["name"] for each in changed)
    named = [(layer_words(name), _one(each)) for name, each in zip(short, changed, strict=True)]
    lines = []
    for words, stretch in groupby(named, lambda each: each[1]):
        names = [name for name, _ in stretch]
        where = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} regions)"
        lines.append(f"{where}: {words}")
    if len(lines) > _ROWS_AT_MOST:
        lines[_ROWS_AT_MOST - 1 :] = [f"{count(len(lines) - _ROWS_AT_MOST + 1, 'line')} more, see --json"]
    return [("  by region" if at == 0 else "", line) for at, line in enumerate(lines)]


def _one(each: dict[str, Any]) -> str:
    a, b = each["a"], each["b"]
    if a is None or b is None:
        return f"only in {'A' if b is None else 'B'}, {region_words(a or b)}"
    operators = f"{count(each['changed_operators'], 'operator')} changed, " if each["changed_operators"] else ""
    return f"{operators}{region_words(a)} -> {region_words(b)}"
