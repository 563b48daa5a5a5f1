"""The map of a plan as one PNG: memory in use above, addresses below, and what ran along the axis."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from memplug.plan.schema import MemoryPlan
from memplug.show import decision_bars
from memplug.show.groups import (
    GRID,
    INK,
    PEAK,
    by_phase,
    layer_colours,
    layer_words,
    phase_letters,
    phase_words,
    short_names,
)
from memplug.show.layout_map import LayoutMap, largest, layout_map, raster
from memplug.show.picture import LETTER_SHARE, legend, new_figure, strip
from memplug.show.timeline import Runs
from memplug.show.words import axis_unit, has_addresses, plan_heading, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

_PIXELS = (800, 1300)  # of the map: about as many as it has in the picture
_DECISIONS_WIDTH = 0.36  # of the map's
_NARROW_LETTER_SHARE = 1.5 * LETTER_SHARE  # of the map beside them
_HATCHED = 12  # groups of dynamic requests; more would hide everything
_OUTLINED = 2_000  # rectangles
_OUTLINED_PIXELS = 4  # of its shorter side: borders of anything thinner would hide it


def write_layout_picture(plan: MemoryPlan, path: str | Path) -> None:
    """Writes a PNG of 1650 by 1045 pixels: the map, beside it the decisions; without addresses these alone.

    Raises:
        MemplugError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    figure = new_figure()
    figure.suptitle(plan_heading(plan), x=0.01, ha="left", fontsize=14, color=INK, parse_math=False)
    decided = decision_bars.bars(plan)
    if decided is None:
        _draw(figure, plan, layout_map(plan), LETTER_SHARE)
    elif not has_addresses(plan):
        decision_bars.draw(figure.subplots(), decided)
    else:
        beside = figure.subfigures(1, 2, width_ratios=[1.0, _DECISIONS_WIDTH])
        _draw(beside[0], plan, layout_map(plan), _NARROW_LETTER_SHARE)
        decision_bars.draw(beside[1].subplots(), decided)
    figure.savefig(path, format="png")


def _draw(figure: FigureBase, plan: MemoryPlan, drawn: LayoutMap, letter_share: float) -> None:
    strips = [
        (name, runs) for name, runs in (("phase", drawn.phase_runs), ("layer", drawn.layer_runs)) if len(runs.value)
    ]
    ratios = [4, 14, *[0.7] * len(strips)]
    curve, addresses, *below = figure.subplots(len(ratios), 1, sharex=True, height_ratios=ratios)
    unit, unit_bytes = axis_unit(plan.solution.height)
    _curve(curve, plan, drawn, unit, unit_bytes)
    _addresses(addresses, plan, drawn, unit, unit_bytes)
    for axes, (name, runs) in zip(below, strips, strict=True):
        _what_ran(axes, plan, drawn, name, runs, letter_share)
    last = below[-1] if below else addresses
    last.set_xlabel("event of the step, running number" if plan.problem.phases else "time", color=INK)
    last.xaxis.set_major_formatter("{x:,.0f}")
    last.set_xlim(drawn.begin, drawn.end)


def _curve(axes: Axes, plan: MemoryPlan, drawn: LayoutMap, unit: str, unit_bytes: int) -> None:
    height, bound = plan.solution.height / unit_bytes, plan.problem.lower_bound / unit_bytes
    axes.fill_between(drawn.times, drawn.live / unit_bytes, step="post", color="#9fb4c7", linewidth=0)
    axes.axhline(height, color=INK, linewidth=1)
    axes.axhline(bound, color=PEAK, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_ylim(0, 1.3 * max(height, 1e-9))
    axes.set_ylabel(f"in use, {unit}", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    # At the side that the mark of the peak leaves free.
    left = not len(drawn.times) or 2 * (drawn.times[drawn.peak] - drawn.begin) > drawn.end - drawn.begin
    text = {"ha": "left" if left else "right", "va": "bottom", "fontsize": 10, "parse_math": False}
    words = f"arena {size(plan.solution.height)}, peak in use {size(plan.problem.lower_bound)}"
    axes.text(
        0.005 if left else 0.995, height / axes.get_ylim()[1] + 0.01, words, transform=axes.transAxes, color=INK, **text
    )
    if len(drawn.times):
        at = drawn.times[drawn.peak]
        axes.plot([at], [bound], marker="v", markersize=8, color=PEAK, clip_on=False)


def _addresses(axes: Axes, plan: MemoryPlan, drawn: LayoutMap, unit: str, unit_bytes: int) -> None:
    groups, of = next(iter(drawn.views.values()))
    pixels = raster(drawn, of + 1, plan.solution.height, _PIXELS)
    palette = np.array([(255, 255, 255), *(_rgb(group.colour) for group in groups)], np.uint8)
    top = plan.solution.height / unit_bytes
    extent = (drawn.begin, drawn.end, 0, max(top, 1e-9))
    axes.imshow(palette[pixels], origin="lower", aspect="auto", extent=extent, interpolation="nearest")
    _outline(axes, plan, drawn, unit_bytes)
    if len(plan.dynamic) <= _HATCHED:
        _hatch(axes, plan, unit_bytes)
    axes.set_ylabel(f"address, {unit}", color=INK)
    axes.set_ylim(0, max(top, 1e-9))
    axes.spines[["top", "right"]].set_visible(False)
    seen = np.unique(of)
    legend(axes, [groups[index] for index in seen])


def _hatch(axes: Axes, plan: MemoryPlan, unit_bytes: int) -> None:
    """What dynamic requests may reuse."""
    for group in plan.dynamic:
        for start, end in group.spaces:
            axes.broken_barh(
                [(group.lower, group.upper - group.lower)],
                (start / unit_bytes, (end - start) / unit_bytes),
                facecolor="none",
                edgecolor="#00000033",
                hatch="////",
                linewidth=0.3,
            )


def _outline(axes: Axes, plan: MemoryPlan, drawn: LayoutMap, unit_bytes: int) -> None:
    """Borders of the largest, so that neighbours of one colour are told apart."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    rows = largest(drawn, _OUTLINED)
    high = (drawn.stop - drawn.start)[rows] / max(plan.solution.height, 1) * _PIXELS[0]
    wide = (drawn.upper - drawn.lower)[rows] / (drawn.end - drawn.begin) * _PIXELS[1]
    rows = rows[np.minimum(high, wide) >= _OUTLINED_PIXELS]
    patches = [
        Rectangle(
            (drawn.lower[row], drawn.start[row] / unit_bytes),
            drawn.upper[row] - drawn.lower[row],
            (drawn.stop[row] - drawn.start[row]) / unit_bytes,
        )
        for row in rows
    ]
    axes.add_collection(PatchCollection(patches, facecolor="none", edgecolor="white", linewidth=0.35), autolim=False)


def _what_ran(axes: Axes, plan: MemoryPlan, drawn: LayoutMap, name: str, runs: Runs, letter_share: float) -> None:
    problem = plan.problem
    moved = Runs(runs.start + drawn.begin, runs.end + drawn.begin, runs.value)
    if name == "phase":
        grouping = by_phase(problem.phases)
        colours = [grouping.groups[group].colour for group in grouping.of]
        labels = ([phase_words(phase) for phase in problem.phases], [phase_letters(phase) for phase in problem.phases])
    else:
        short = short_names(problem.layers)
        colours, labels = layer_colours(len(short)), ([layer_words(each) for each in short], short)
    strip(axes, drawn.end - drawn.begin, moved, colours, labels, letter_share)
    axes.set_ylabel(name, rotation=0, ha="right", va="center", color=INK)


def _rgb(colour: str) -> tuple[int, int, int]:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return red, green, blue
