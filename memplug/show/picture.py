"""A figure as one PNG of 1650 by 1045 pixels, by matplotlib."""

from __future__ import annotations

from functools import singledispatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from memplug.errors import MemplugError
from memplug.show import figure as model
from memplug.show.figure import GRID, INK, PEAK, Axis, Column, Figure, Group, Rectangles, Stack
from memplug.show.groups import is_dark
from memplug.show.raster import largest, raster

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

_WIDTH_IN, _HEIGHT_IN, _DOTS_PER_IN = 15.0, 9.5, 110
_LETTER = 0.0075  # of the width of the only column
_PIXELS = (800, 1300)  # of the raster: about as many as the axes have
_OUTLINED = 2_000  # rectangles
_OUTLINED_PIXELS = 4  # of its shorter side: borders of anything thinner would hide it
_SEEN = 1 / 500  # of the peak; less has no colour to look up
_RUNS_APART = 80  # more have no gaps between them
_SMALL = 9.5  # of letters, in points


def write_picture(figure: Figure, path: str | Path) -> None:
    """Writes it; nothing of matplotlib's global state is used, and no display.

    Raises:
        MemplugError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise MemplugError(
            "a picture needs matplotlib, which is not installed", "Run `pip install 'memplug[pictures]'`."
        ) from None
    # The objects, not pyplot.
    canvas = Canvas(figsize=(_WIDTH_IN, _HEIGHT_IN), dpi=_DOTS_PER_IN, layout="constrained")
    FigureCanvasAgg(canvas)
    canvas.suptitle(figure.title, x=0.01, ha="left", fontsize=14, color=INK, parse_math=False)
    widths = [column.width for column in figure.columns]
    parts = canvas.subfigures(1, len(widths), width_ratios=widths) if len(widths) > 1 else [canvas]
    for part, column in zip(parts, figure.columns, strict=True):
        _column(part, column, _LETTER * (len(widths) + 1) / 2)
    canvas.savefig(path, format="png")


def _column(part: FigureBase, column: Column, letter: float) -> None:
    rows = [(panel, name) for panel in column.panels for name in [*panel.views][: panel.pictured] or [None]]
    heights = [panel.height / (panel.pictured if panel.views else 1) for panel, _ in rows]
    made = part.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (panel, name) in zip(made, rows, strict=True):
        title = [f"By the {name} that asked for it"] if panel.pictured > 1 else panel.title
        axes.set_title("\n".join(title), loc="left", fontsize=11 if name else _SMALL, color=INK)
        axes.set_ylabel(panel.y.words, color=INK)
        axes.set_ylim(panel.y.drawn)
        if panel.y.ticks is not None:
            names = panel.y.ticks.values()
            axes.set_yticks([*panel.y.ticks], names, fontsize=_SMALL, color=INK, parse_math=False)
            axes.tick_params(axis="y", length=0)
        for content in ([panel.views[name]] if name else []) + [*panel.content]:
            _draw(content, axes, column.x, panel.y, letter)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        for axis, ruled in (("x", column.x), ("y", panel.y)):
            if ruled.grid:
                axes.grid(axis=axis, color=GRID, linewidth=0.6)
        _add_legend(axes, beside=panel.y.ticks is None)
    made[-1].set_xlabel(column.x.words, color=INK)
    made[-1].set_xlim(column.x.drawn)
    if column.x.unit is None:
        made[-1].xaxis.get_major_locator().set_params(integer=True)
        made[-1].xaxis.set_major_formatter("{x:,.0f}")


def _add_legend(axes: Axes, *, beside: bool) -> None:
    """Names what has a gid in these axes: from the top of the stack down, beside them, or below.

    A label would not do: matplotlib leaves out those that begin with "_", such as "_orig_mod".
    """
    named = {child.get_gid(): child for child in axes.get_children() if child.get_gid()}
    if not named:
        return
    labels, handles = list(named), list(named.values())
    if beside:
        place = {"loc": "upper left", "bbox_to_anchor": (1.005, 1.0)}
        legend = axes.legend(handles[::-1], labels[::-1], **place, frameon=False, fontsize=_SMALL)
    else:
        legend = axes.figure.legend(handles, labels, loc="outside lower left", frameon=False, fontsize=_SMALL)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _name(axes: Axes, group: Group, **looks: Any) -> None:
    """Has the legend name a colour."""
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((0, 0), 0, 0, facecolor=group.colour, gid=group.label, **looks))


@singledispatch
def _draw(content: object, axes: Axes, x: Axis, y: Axis, letter: float) -> None:
    raise AssertionError(f"no drawing of {type(content)}")


@_draw.register(Stack)
def _stack(stack: Stack, axes: Axes, x: Axis, y: Axis, letter: float) -> None:
    if not len(stack.x):
        return
    levels = stack.levels / y.scale
    tops = np.cumsum(levels, axis=0)
    for group, level, top in zip(stack.groups, levels, tops, strict=True):
        # With an edge of its own colour, a spike narrower than a pixel stays visible. Nowhere else: the edges of an
        # empty group would cover those below it.
        seen = level.max() > tops[-1].max() * _SEEN
        looks = {"facecolor": group.colour, "edgecolor": group.colour, "gid": group.label if seen else None}
        held = np.where(level > 0, top, np.nan)[:-1]
        axes.stairs(held, stack.x, baseline=(top - level)[:-1], fill=True, linewidth=0.4, **looks)


@_draw.register(model.Steps)
def _steps(steps: model.Steps, axes: Axes, x: Axis, y: Axis, letter: float) -> None:
    axes.step(steps.x, steps.y / y.scale, where="post", color=INK, linewidth=0.4, alpha=0.5)


@_draw.register(model.Bars)
def _bars(bars: model.Bars, axes: Axes, x: Axis, y: Axis, letter: float) -> None:
    begin, length = bars.begin / x.scale, bars.length / x.scale
    looks: dict[str, Any] = {"color": bars.colours, "linewidth": 0}
    if bars.group is not None:
        looks["gid"] = bars.group.label
        looks |= {"edgecolor": "white", "hatch": "///"} if bars.group.hatched else {}
    elif len(begin) <= _RUNS_APART:
        looks |= {"edgecolor": "white", "linewidth": 0.5}
    axes.barh(bars.row, length, bars.thickness, left=begin, **looks)
    if bars.names:
        axes.spines["left"].set_visible(False)
    middles, room = begin + length / 2, length / (x.high - x.low) / letter
    for middle, letters, colour, names in zip(middles, room, bars.colours, bars.names, strict=bool(bars.names)):
        name = next((name for name in names if letters > len(name)), None)
        if name:
            ink = "white" if is_dark(colour) else INK
            axes.text(middle, -0.04, name, color=ink, ha="center", va="center", fontsize=8.5, parse_math=False)


@_draw.register(Rectangles)
def _rectangles(drawn: Rectangles, axes: Axes, x: Axis, y: Axis, letter: float) -> None:
    """A raster of all, and borders of the largest, so that neighbours of one colour are told apart."""
    pixels = raster(drawn, (x.low, x.high), y.high, _PIXELS)
    colours = ["#ffffff", *(group.colour for group in drawn.groups)]
    palette = np.array([[*bytes.fromhex(colour[1:])] for colour in colours], np.uint8)
    extent = (*x.drawn, *y.drawn)
    axes.imshow(palette[pixels], origin="lower", aspect="auto", extent=extent, interpolation="nearest")
    rows = largest(drawn, _OUTLINED)
    edges = np.stack([drawn.lower, drawn.upper, drawn.start, drawn.stop], axis=1)[rows]
    wide = (edges[:, 1] - edges[:, 0]) / (x.high - x.low) * _PIXELS[1]
    high = (edges[:, 3] - edges[:, 2]) / y.high * _PIXELS[0]
    _outline(axes, edges[np.minimum(high, wide) >= _OUTLINED_PIXELS], y, edgecolor="white", linewidth=0.35)
    for index in np.unique(drawn.of):
        _name(axes, drawn.groups[index])


@_draw.register(model.Spaces)
def _spaces(spaces: model.Spaces, axes: Axes, x: Axis, y: Axis, letter: float) -> None:
    looks = {"edgecolor": "#00000033", "hatch": "////", "linewidth": 0.3}
    _outline(axes, spaces.boxes, y, **looks)
    _name(axes, Group(spaces.label, "none"), **looks)


def _outline(axes: Axes, boxes: Any, y: Axis, **looks: Any) -> None:
    """Borders of rectangles: (lower, upper, start, stop) each."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    patches = [
        Rectangle((left, low / y.scale), right - left, (high - low) / y.scale) for left, right, low, high in boxes
    ]
    axes.add_collection(PatchCollection(patches, facecolor="none", **looks), autolim=False)


@_draw.register(model.Line)
def _line(line: model.Line, axes: Axes, x: Axis, y: Axis, letter: float) -> None:
    style = {"color": line.colour, "linestyle": (0, (4, 3)) if line.dashed else "-"}
    if line.x is not None:
        axes.axvline(line.x, linewidth=0.8, **style, zorder=2 if line.dashed else 0)
        return
    axes.axhline(line.y / y.scale, linewidth=1, **style)
    at, side = (0.005, "left") if line.label_left else (0.995, "right")
    text = {"ha": side, "va": "bottom", "fontsize": 10, "parse_math": False}
    axes.text(at, line.y / y.high + 0.01, line.label, transform=axes.transAxes, color=INK, **text)


@_draw.register(model.Mark)
def _mark(mark: model.Mark, axes: Axes, x: Axis, y: Axis, letter: float) -> None:
    at = (mark.x, mark.y / y.scale)
    axes.plot(*at, marker="v", markersize=8, color=PEAK, clip_on=False)
    side, away = ("right", -9) if 2 * mark.x > x.low + x.high else ("left", 9)
    text = {"ha": side, "va": "bottom", "fontsize": 10, "color": PEAK, "parse_math": False}
    white = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    axes.annotate(mark.text, at, xytext=(away, 9), textcoords="offset points", bbox=white, **text)
