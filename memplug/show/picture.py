"""A trace's memory timeline as one PNG: by phase above, by layer below, and what ran along the axis."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from memplug.errors import MemplugError
from memplug.profile.trace import Trace
from memplug.show.groups import (
    GRID,
    INK,
    LINES_AT_MOST,
    PEAK,
    Group,
    is_dark,
    layer_colours,
    layer_words,
    phase_letters,
    phase_words,
    short_names,
)
from memplug.show.timeline import Runs, Timeline, timeline
from memplug.show.words import axis_unit, heading, moment, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH_IN, _HEIGHT_IN, _DOTS_PER_IN = 15.0, 9.5, 110
LETTER_SHARE = 0.0075  # of the width of axes as wide as the picture


def write_picture(trace: Trace, path: str | Path) -> None:
    """Writes a PNG of 1650 by 1045 pixels.

    Raises:
        MemplugError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    figure = new_figure()
    # More stretches than the axes have pixels.
    _draw(figure, trace, timeline(trace, bins=1600))
    figure.savefig(path, format="png")


def new_figure() -> Figure:
    """An empty one of 1650 by 1045 pixels; nothing of matplotlib's global state is used, and no display.

    Raises:
        MemplugError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MemplugError(
            "a picture needs matplotlib, which is not installed", "Run `pip install 'memplug[pictures]'`."
        ) from None
    # The objects, not pyplot.
    figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), dpi=_DOTS_PER_IN, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _draw(figure: Figure, trace: Trace, line: Timeline) -> None:
    figure.suptitle(heading(trace), x=0.01, ha="left", fontsize=14, color=INK, parse_math=False)
    by_phase, by_layer, phases, layers = figure.subplots(4, 1, sharex=True, height_ratios=[10, 10, 0.8, 0.8])
    _stack(by_phase, line, line.bytes_by_phase, line.phases.groups, "By the phase that asked for it")
    _stack(by_layer, line, line.bytes_by_layer, line.layers.groups, "By the layer that asked for it")
    for axes in (by_phase, by_layer):
        _mark_peak(axes, trace, line)
    colours = [line.phases.groups[group].colour for group in line.phases.of]
    words, letters = ([name(phase) for phase in trace.phases] for name in (phase_words, phase_letters))
    strip(phases, line.length, line.phase_runs, colours, (words, letters))
    phases.set_ylabel("phase", rotation=0, ha="right", va="center", color=INK)
    names = short_names(trace.layers)
    strip(
        layers, line.length, line.layer_runs, layer_colours(len(names)), ([layer_words(name) for name in names], names)
    )
    layers.set_ylabel("layer", rotation=0, ha="right", va="center", color=INK)
    layers.set_xlabel(f"{line.clock}, running number", color=INK)
    layers.xaxis.get_major_locator().set_params(integer=True)
    layers.xaxis.set_major_formatter("{x:,.0f}")
    layers.set_xlim(0, max(line.length, 1))


def _stack(axes: Axes, line: Timeline, levels_bytes: np.ndarray, groups: tuple[Group, ...], title: str) -> None:
    unit, unit_bytes = axis_unit(int(line.in_use_bytes.max()))
    shown = [i for i in range(len(groups)) if levels_bytes[i].any()]
    tops = np.cumsum(levels_bytes, axis=0) / unit_bytes
    for i in shown:
        _band(axes, line.at, tops[i] - levels_bytes[i] / unit_bytes, tops[i], groups[i].colour)
    x, y = _steps(line.at, tops[-1])
    axes.plot(x, y, color=INK, linewidth=0.4, alpha=0.5)
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_ylabel(f"memory in use, {unit}", color=INK)
    # Room above the highest place for its label.
    axes.set_ylim(0, 1.16 * max(line.in_use_bytes.max() / unit_bytes, 1e-9))
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if len(line.phase_runs.start) <= LINES_AT_MOST:
        for start in line.phase_runs.start[1:]:
            axes.axvline(start, color=GRID, linewidth=0.6, zorder=0)
    for start in line.step_starts[1:]:
        axes.axvline(start, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    # What never reaches a pixel has no colour to look up.
    legend(axes, [groups[i] for i in shown if levels_bytes[i].max() > line.in_use_bytes.max() / 500])


def _band(axes: Axes, at: np.ndarray, bottom: np.ndarray, top: np.ndarray, colour: str) -> None:
    """Fills a group where it holds something."""
    x, top = _steps(at, top)
    _, bottom = _steps(at, bottom)
    # With an edge of its own colour, a spike narrower than a pixel stays visible. Nowhere else: the edges of an empty
    # group would cover those below it.
    axes.fill_between(x, bottom, top, where=top > bottom, facecolor=colour, edgecolor=colour, linewidth=0.4)


def _steps(at: np.ndarray, level: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Corners of a line that holds each level until the next sample."""
    return np.repeat(at, 2)[1:], np.repeat(level, 2)[:-1]


def legend(axes: Axes, groups: list[Group]) -> None:
    """Names the colours, from the top of the stack down, beside the axes."""
    from matplotlib.patches import Patch

    # In the order of the stack, beside the data.
    patches = [Patch(facecolor=group.colour) for group in reversed(groups)]
    labels = [group.label for group in reversed(groups)]
    box = axes.legend(patches, labels, loc="upper left", bbox_to_anchor=(1.005, 1.0), frameon=False, fontsize=9.5)
    for text in box.get_texts():
        text.set_parse_math(False)


def _mark_peak(axes: Axes, trace: Trace, line: Timeline) -> None:
    unit, unit_bytes = axis_unit(int(line.in_use_bytes.max()))
    x, y = line.at[line.peak], line.in_use_bytes[line.peak] / unit_bytes
    axes.plot([x], [y], marker="v", markersize=8, color=PEAK, clip_on=False)
    right = x > line.length / 2
    axes.annotate(
        f"peak {size(int(line.in_use_bytes[line.peak]))}: {moment(trace, int(line.event[line.peak]))}",
        (x, y),
        xytext=(-9 if right else 9, 9),
        textcoords="offset points",
        ha="right" if right else "left",
        va="bottom",
        fontsize=10,
        color=PEAK,
        parse_math=False,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
    )


def strip(
    axes: Axes,
    length: int,
    runs: Runs,
    colours: list[str],
    labels: tuple[list[str], list[str]],
    letter_share: float = LETTER_SHARE,
) -> None:
    """What ran, as a row of coloured stretches; each has its long label, its short one, or none, as there is room.

    Args:
        letter_share: of the axes' width that a letter takes.
    """
    inside = runs.value >= 0
    axes.broken_barh(
        np.stack([runs.start, runs.end - runs.start], axis=1)[inside],
        (0, 1),
        facecolors=[colours[value] for value in runs.value[inside]],
        linewidth=0.5 if len(runs.start) <= LINES_AT_MOST else 0,
        edgecolor="white",
    )
    for start, end, value in zip(runs.start[inside], runs.end[inside], runs.value[inside], strict=True):
        share = (end - start) / length
        label = next((names[value] for names in labels if share > letter_share * len(names[value])), "")
        if label:
            ink = "white" if is_dark(colours[value]) else INK
            place = {"ha": "center", "va": "center", "fontsize": 8.5}
            axes.text((start + end) / 2, 0.46, label, color=ink, parse_math=False, **place)
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)
