"""Turns the decisions of a plan into plain values, region by region, and these values into words."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from memplug.figures.groups import range_words, short_names
from memplug.figures.words import Rows
from memplug.plans.schema import MemoryPlan
from memplug.profile.records import Layer
from memplug.tokenwise.plan.decisions import Decisions, Setting
from memplug.words import count, duration, known, size

KINDS = ("swapped", "kept", "recomputed")
"""The ways in which a region's backward gets its tensors. Both a region and the totals have the keys "swapped_bytes",
"kept_bytes" and "recomputed_bytes"."""
OPERATORS = ("swapped_whole_operators", "swapped_by_rows_operators", "kept_operators")
"""Further keys of a region and of the totals."""
_ROWS_AT_MOST = 8


def decisions(plan: MemoryPlan) -> dict[str, Any] | None:
    """Return the decisions and predictions of a plan, for `memplug show --json`.

    Keys are stable and name their units. A region's bytes are those of one forward; the totals are sums over all
    regions. `host_bytes` and `device_bytes` are predictions for a whole step, not sums over regions: a step may have
    several forwards of a region in flight, and a region that `offloads_late` offloads only if its memory is needed.

    Returns:
        Values that JSON can hold, by key; None if the plan has no decisions.
    """
    training, decided = plan.training, Decisions.of(plan)
    if training is None or decided is None:
        return None
    solution, program = decided.solution, training.program
    regions = [_region(name, decided.settings[name]) for name in _in_order(decided.settings)]
    bytes_keys = [f"{kind}_bytes" for kind in KINDS]
    return {
        "run": training.run,
        "program": training.index,
        "program_operators": len(program.operators) if program and program.operators is not None else None,
        "inputs": list(plan.fingerprint.inputs),
        "d2h_bytes_per_s": decided.d2h_bytes_per_s,
        "h2d_bytes_per_s": decided.h2d_bytes_per_s,
        "regions": regions,
        "plain_regions": sum(region["plain"] for region in regions),
        **{name: sum(region[name] for region in regions) for name in (*bytes_keys, *OPERATORS)},
        "offloads_late_bytes": sum(region["swapped_bytes"] for region in regions if region["offloads_late"]),
        "step_s": solution.step_s,
        "forward_s": solution.forward_s,
        "backward_s": solution.backward_s,
        "full_recomputation_s": decided.full_recomputation_s,
        "peak_bytes": decided.peak_bytes,
        "host_bytes": solution.host_bytes,
        "device_bytes": solution.device_bytes,
        "bound": solution.bound,
    }


def rows(facts: dict[str, Any]) -> Rows:
    """Return the result of `decisions` as rows (name, value), in words."""
    operators = facts["program_operators"]
    length = "operators not recorded" if operators is None else f"{operators:,} operators"
    full_s, peak_bytes, late_bytes = facts["full_recomputation_s"], facts["peak_bytes"], facts["offloads_late_bytes"]
    rates = facts["d2h_bytes_per_s"], facts["h2d_bytes_per_s"]
    link = f"{rates[0] / 1e9:.1f} GB/s to the host, {rates[1] / 1e9:.1f} GB/s to the device"
    whole, by_rows, kept = (facts[name] for name in OPERATORS)
    return [
        ("made by", f"run {facts['run']}"),
        ("program", f"number {facts['program']} of the run, {length}"),
        *([("link", link)] if any(rates) else []),
        (
            "predicted step",
            f"{duration(facts['step_s'])} in regions: forward {duration(facts['forward_s'])}, "
            f"backward {duration(facts['backward_s'])}",
        ),
        ("  full recomputation", known(full_s, duration)),
        ("predicted peak", "unknown" if peak_bytes is None else f"{size(peak_bytes)} on the device"),
        ("  kept and in flight", size(facts["device_bytes"])),
        ("host memory", size(facts["host_bytes"])),
        ("bound by", bound_words(facts["bound"])),
        ("captured operators", f"{whole:,} swapped whole, {by_rows:,} by rows, {kept:,} kept"),
        ("decisions", f"{bytes_words(facts)} in one forward of {count(len(facts['regions']), 'region')}"),
        *([("  only if needed", f"{size(late_bytes)} of the swapped bytes")] if late_bytes else []),
        *_region_rows(facts["regions"]),
    ]


def bytes_words(facts: dict[str, Any]) -> str:
    """Return bytes by kind, such as "1.00 GiB swapped, 12.00 MiB kept", without kinds that have none."""
    return ", ".join(f"{size(facts[f'{kind}_bytes'])} {kind}" for kind in KINDS if facts[f"{kind}_bytes"]) or "nothing"


def region_words(region: dict[str, Any], *, each: bool = False) -> str:
    """Return a region's decisions in words; `each` says that they hold for each of several equal regions."""
    words = bytes_words(region) + (" each" if each else "")
    if region["plain"]:
        return f"{words}, as without memplug"
    return f"{words}, offloaded only if needed" if region["offloads_late"] else words


def bound_words(bound: str) -> str:
    """Return `TokenwisePlan.bound` in words that can follow "bound by"."""
    return "nothing" if bound == "none" else bound


def short_region_names(names: Iterable[str]) -> list[str]:
    """Shorten names of regions as `short_names` does names of layers."""
    return short_names([Layer(name) for name in names])


def _in_order(names: Iterable[str]) -> list[str]:
    """Sort names: those that differ only in numbers stand together, in numeric order."""
    stems = {stem: at for at, stem in enumerate(dict.fromkeys(map(_stem, names)))}
    return sorted(names, key=lambda name: (stems[_stem(name)], [int(digits) for digits in re.findall("[0-9]+", name)]))


def _stem(name: str) -> str:
    return re.sub("[0-9]+", "#", name)


def _region(name: str, setting: Setting) -> dict[str, Any]:
    made = (setting.plan or {}).values()
    swapped = [decision.fraction for decision in made if not decision.keep]
    return {
        "name": name,
        "plain": setting.plain_bytes is not None,
        "offloads_late": setting.learnt is not None and setting.learnt.offloads_late,
        "swaps_input": setting.swaps_input and setting.plain_bytes is None,
        "swapped_bytes": setting.forward_bytes or 0,
        "kept_bytes": setting.kept_bytes,
        "recomputed_bytes": setting.recomputed_bytes,
        "swapped_whole_operators": sum(fraction == 1.0 for fraction in swapped),
        "swapped_by_rows_operators": sum(fraction < 1.0 for fraction in swapped),
        "kept_operators": len(made) - len(swapped),
    }


def _region_rows(regions: list[dict[str, Any]]) -> Rows:
    """Return lines, one for each run of neighbouring regions with equal decisions; the last may sum up all others."""
    names = [region["name"] for region in regions]
    short = dict(zip(names, short_region_names(names), strict=True))

    def alike(region: dict[str, Any]) -> tuple:
        return (_stem(region["name"]), *(value for name, value in region.items() if name != "name"))

    stretches = [list(stretch) for _, stretch in groupby(regions, alike)]
    shown = stretches if len(stretches) <= _ROWS_AT_MOST else stretches[: _ROWS_AT_MOST - 1]
    lines = []
    for stretch in shown:
        where = range_words(short[stretch[0]["name"]], short[stretch[-1]["name"]])
        lines.append(f"{where}: {region_words(stretch[0], each=len(stretch) > 1)}")
    rest = [region for stretch in stretches[len(shown) :] for region in stretch]
    if rest:
        totals = {f"{kind}_bytes": sum(region[f"{kind}_bytes"] for region in rest) for kind in KINDS}
        lines.append(f"{len(rest)} others: {bytes_words(totals)} in all")
    return [("  by region" if at == 0 else "", line) for at, line in enumerate(lines)]
