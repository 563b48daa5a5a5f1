"""Draws decisions as a column of a figure: one stacked bar per region, under a title with the plan's predictions."""

from __future__ import annotations

from typing import Any

import numpy as np

from memplug.figures.figure import Axis, Bars, ColourGroup, Column, Panel, bytes_axis
from memplug.plans.schema import MemoryPlan
from memplug.tokenwise.picture.decisions import decisions, region_words, short_region_names
from memplug.words import duration, size

# colours that the map of addresses does not use; a lighter one is for bytes that cost less link time and memory
_SWAPPED, _LATE, _KEPT, _PLAIN, _RECOMPUTED = (
    ColourGroup("swapped", "#8e2f6f"),
    ColourGroup("swapped, only if needed", "#8e2f6f", hatched=True),
    ColourGroup("kept", "#d77fb0"),
    ColourGroup("kept, as without memplug", "#f0c9de"),
    ColourGroup("recomputed", "#c9c4bb"),
)
_LABELS_AT_MOST = 40  # labels of regions along the axis; more would touch
_LETTERS_AT_MOST = 18  # letters in a label
_ROWS_AT_LEAST = 8  # rows of the axis; with fewer, bars would be too thick
_THICKNESS = 0.8  # thickness of a bar, in rows of the axis; 1 leaves no gap
_WIDTH = 0.36  # width of the column, relative to the map of addresses


def column(plan: MemoryPlan) -> Column | None:
    """Return the bars, each for one forward of a region; None if the plan has no decisions."""
    facts = decisions(plan)
    if facts is None or not facts["regions"]:
        return None
    regions = facts["regions"]
    split = [_split(region) for region in regions]
    shown = [group for group in split[0] if any(each[group] for each in split)] or [_SWAPPED]
    names = [_cut(name) for name in short_region_names(region["name"] for region in regions)]
    labelled = range(0, len(regions), -(-len(regions) // _LABELS_AT_MOST))
    words = [f"{region['name']}: {region_words(region)}" for region in regions]
    lowest = max(len(regions), _ROWS_AT_LEAST) - 0.5
    rows = Axis(title="region", low=lowest, high=-0.5, ticks={row: names[row] for row in labelled})
    amounts = np.array([[each[group] for each in split] for group in shown], np.float64)
    ends, at = np.cumsum(amounts, axis=0), np.arange(len(regions))
    bars = [
        Bars(end - length, length, at, [group.colour] * len(at), words, thickness=_THICKNESS, group=group)
        for group, end, length in zip(shown, ends, amounts, strict=True)
    ]
    panel = Panel(y=rows, height=1, content=bars, title=_predicted(facts))
    axis = bytes_axis("bytes of one forward", float(ends[-1].max()), 1.04)
    return Column(x=axis, panels=(panel,), width=_WIDTH)


def _split(region: dict[str, Any]) -> dict[ColourGroup, int]:
    """Return the bytes of a region by group, in the order of its bar from the left."""
    found = dict.fromkeys((_SWAPPED, _LATE, _KEPT, _PLAIN, _RECOMPUTED), 0)
    found[_LATE if region["offloads_late"] else _SWAPPED] = region["swapped_bytes"]
    found[_PLAIN if region["plain"] else _KEPT] = region["kept_bytes"]
    found[_RECOMPUTED] = region["recomputed_bytes"]
    return found


def _predicted(facts: dict[str, Any]) -> tuple[str, ...]:
    full_s, peak_bytes = facts["full_recomputation_s"], facts["peak_bytes"]
    return (
        "Decisions by region, and predictions",
        f"step {duration(facts['step_s'])}"
        + (f", full recomputation {duration(full_s)}" if full_s is not None else ""),
        (f"peak {size(peak_bytes)}, " if peak_bytes is not None else "") + f"host memory {size(facts['host_bytes'])}",
    )


def _cut(name: str) -> str:
    """Cut off the start of a long name, to leave room for its bar."""
    return name if len(name) <= _LETTERS_AT_MOST else "…" + name[1 - _LETTERS_AT_MOST :]
