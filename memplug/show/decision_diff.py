"""What two plans decide differently and what that costs, in one object of plain values, and that object in words."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

from memplug.plan.decisions import Setting
from memplug.plan.schema import MemoryPlan
from memplug.show.decisions import KINDS, OPERATORS, bound_words, decisions, region_words, short_region_names
from memplug.show.groups import layer_words
from memplug.show.summary import count
from memplug.show.words import both, change, duration, size

_ROWS_AT_MOST = 8
_OF_A_PLAN = ("step_s", "full_recomputation_s", "peak_bytes", "host_bytes", "device_bytes", "bound", "run")


def diff(a: MemoryPlan, b: MemoryPlan) -> dict[str, Any] | None:
    """The part of `plan_diff.diff` on decisions.

    A region is changed if another operator of it is captured, another fraction of its rows, or kept instead of swapped;
    if its input is swapped in one plan alone; or if it runs as without memplug in one plan alone. Bytes may differ
    without that, as those of another micro-batch do.

    Returns:
        None where neither plan has decisions. `a` and `b` are None where that plan has none; `changed` has every
        changed region, with None for the plan that lacks it.
    """
    sides = {"a": decisions(a), "b": decisions(b)}
    if sides["a"] is None and sides["b"] is None:
        return None
    settings = {name: plan.training.decisions.settings for name, plan in (("a", a), ("b", b)) if sides[name]}
    by_name = {
        name: {region["name"]: region for region in its["regions"]} if its else {} for name, its in sides.items()
    }
    names = list(dict.fromkeys([*by_name["a"], *by_name["b"]]))
    changed = []
    for name in names:
        mine, its = (settings.get(side, {}).get(name) for side in "ab")
        if mine is None or its is None or _chosen(mine) != _chosen(its):
            each = {"name": name, "changed_operators": _changed_operators(mine, its)}
            changed.append({**each, **{side: by_name[side].get(name) for side in "ab"}})
    return {
        **{name: _totals(its) if its else None for name, its in sides.items()},
        "regions": len(names),
        "changed_regions": len(changed),
        "changed": changed,
    }


def rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """What `diff` returned, as (name, value) in words."""
    a, b = facts["a"], facts["b"]
    return [
        ("decisions", _changed_words(facts)),
        *(_changed_rows(facts["changed"]) if a and b else []),
        *((f"  {kind}", _amounts(a, b, f"{kind}_bytes", size)) for kind in KINDS),
        ("predicted step", _amounts(a, b, "step_s", duration)),
        ("predicted peak", _amounts(a, b, "peak_bytes", size)),
        ("host memory", _amounts(a, b, "host_bytes", size)),
        (
            "bound by",
            both(*(bound_words(side["bound"]) for side in (a, b))) if a and b else bound_words((a or b)["bound"]),
        ),
    ]


def _amounts(a: dict[str, Any] | None, b: dict[str, Any] | None, name: str, words: Callable[[Any], str]) -> str:
    """Both plans' amounts, or that of the only plan with decisions."""
    if a and b:
        return change(a[name], b[name], words)
    amount = (a or b)[name]
    return "unknown" if amount is None else words(amount)


def _totals(facts: dict[str, Any]) -> dict[str, Any]:
    names = (*(f"{kind}_bytes" for kind in KINDS), *OPERATORS, "plain_regions", *_OF_A_PLAN)
    return {name: facts[name] for name in names}


def _chosen(setting: Setting) -> tuple:
    """What is decided of a region; bytes follow from it."""
    plain = setting.plain_bytes is not None
    return plain, (setting.swaps_input and not plain), setting.plan or {}


def _changed_operators(a: Setting | None, b: Setting | None) -> int:
    """Operators with a decision in one of the two that is not the other's."""
    mine, its = ((setting.plan or {}) if setting else {} for setting in (a, b))
    return sum(mine.get(index) != its.get(index) for index in mine.keys() | its.keys())


def _changed_words(facts: dict[str, Any]) -> str:
    if facts["a"] is None or facts["b"] is None:
        return f"only in {'A' if facts['a'] else 'B'}, of {count(facts['regions'], 'region')}"
    if not facts["changed_regions"]:
        return "the same in both"
    return f"changed in {facts['changed_regions']:,} of {count(facts['regions'], 'region')}"


def _changed_rows(changed: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """A line for each of the first regions; neighbours that changed alike share one."""
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
    operators = f"{count(each['changed_operators'], 'operator')} otherwise, " if each["changed_operators"] else ""
    return f"{operators}{region_words(a)} -> {region_words(b)}"
