"""Translates a figure into plotly's traces and layout; `page` makes a page of them and `picture` a PNG."""

from __future__ import annotations

import html
from functools import singledispatch
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from memplug.figures import figure as model
from memplug.figures.figure import GRID, INK, PEAK, Axis, Column, Figure, Panel, Rectangles, Stack
from memplug.figures.groups import is_dark
from memplug.show.page_hover import facts
from memplug.show.raster import largest, raster

_SPACING = 0.013  # space between panels, as a share of the figure's height
_LEGEND = 0.21  # space between columns, for legends, as a share of the figure's width
_BELOW_TITLE = 0.9  # upper edge of panels below a title and the legend of bars, as a share of the figure's height
_PIXELS = (600, 1200)  # rows and columns of the raster below the rectangles
_RECTANGLES = 15_000  # at most so many rectangles, the largest, are drawn one by one
_FEW = 8  # axes that span at most this get a tick at each whole number


class Drawn:
    """A figure as plotly draws it, built panel by panel.

    A legend stands beside its panel, aligned with the panel's top or, if centred, with its middle. If several panels
    have legends, a long one aligned with the top may reach behind the legend of the next panel.

    Args:
        figure: The figure to translate.
        centred: Whether legends are centred on their panels.

    Attributes:
        traces: plotly's traces.
        layout: plotly's layout.
        facts: Markup for the script that describes the rectangle under the pointer; empty without rectangles.
    """

    def __init__(self, figure: Figure, *, centred: bool = False) -> None:
        self.traces: list[dict[str, Any]] = []
        self.facts = ""
        self._views: list[str | None] = []  # name of each trace's view; None: always visible
        self._axes = 0
        self._asked, self._legends = figure.legend, 0  # title of the views' legends; how many there are so far
        self._centred = centred
        panels = [panel for column in figure.columns for panel in column.panels]
        stacked = any(isinstance(view, Stack) for panel in panels for view in panel.views.values())
        title = {"text": html.escape(figure.title), "subtitle": {"text": html.escape(figure.subtitle)}}
        self.layout: dict[str, Any] = {
            "title": {**title, "x": 0.01, "xanchor": "left", "y": 0.97, "yanchor": "top"},
            "template": "plotly_white",
            "hovermode": "x unified" if stacked else "closest",
            "bargap": 0,
            "barmode": "overlay",
            "uniformtext": {"minsize": 9, "mode": "hide"},
            "margin": {"l": 80, "r": 20, "t": 125, "b": 60},
            "shapes": [],
            "annotations": [],
        }
        left = 0.0
        for column in figure.columns:
            share = column.width / sum(each.width for each in figure.columns)
            right = left + share * (1 - _LEGEND * (len(figure.columns) - 1))
            self._add_column(column, left, right)
            left = right + _LEGEND
        for panel in panels:
            if len(panel.views) > 1:
                self._add_switch([*panel.views])

    def _add_column(self, column: Column, left: float, right: float) -> None:
        top = _BELOW_TITLE if column.panels[0].title else 1.0
        last = self._axes + len(column.panels)
        shared = (top - _SPACING * (len(column.panels) - 1)) / sum(panel.height for panel in column.panels)
        for panel in column.panels:
            self._axes += 1
            at = str(self._axes) if self._axes > 1 else ""
            bottom = max(top - shared * panel.height, 0)
            x = {**_axis(column.x), "domain": [left, right], "anchor": f"y{at}"}
            if self._axes < last:
                x |= {"matches": f"x{last}", "showticklabels": False, "title": None}
            y = {**_axis(panel.y), "domain": [bottom, top], "anchor": f"x{at}"}
            self.layout |= {f"xaxis{at}": x, f"yaxis{at}": y}
            legend = self._add_legend([*panel.views], right, top, bottom) if panel.views else ""
            self._add_panel(panel, column.x, at, legend)
            if panel.title:
                text = "<br>".join(map(html.escape, panel.title))
                place = {"x": left, "xanchor": "left", "yanchor": "bottom"}
                paper = {"xref": "paper", "yref": "paper", "y": 1, "align": "left", "showarrow": False}
                self.layout["annotations"].append({**place, **paper, "text": text})
                self.layout["legend2"] = {**place, "y": top + 0.005, "orientation": "h"}
            top = bottom - _SPACING

    def _add_legend(self, views: list[str], right: float, top: float, bottom: float) -> str:
        """Add a legend beside a panel with views, and return plotly's name for it."""
        self._legends += 1
        name = "legend" if self._legends == 1 else f"legend{self._legends + 1}"  # legend2 is the legend of bars
        asked = f"{self._asked} {views[0]}" if self._asked and len(views) == 1 else self._asked
        place = {"yanchor": "middle", "y": (top + bottom) / 2} if self._centred else {"yanchor": "top", "y": top}
        self.layout[name] = {
            "traceorder": "reversed",
            "title": {"text": html.escape(asked)},
            "x": right + 0.01,
            **place,
        }
        return name

    def _add_panel(self, panel: Panel, x: Axis, at: str, legend: str) -> None:
        drawn = [(name, view) for name, view in panel.views.items()] + [(None, content) for content in panel.content]
        for name, content in drawn:
            made = _made(content, x, panel.y)
            of_view = {}
            if name is not None:
                group = "stackgroup" if isinstance(content, Stack) else "legendgroup"
                of_view = {"visible": name == drawn[0][0], group: name, "legend": legend}
            self.traces += [{**trace, "xaxis": f"x{at}", "yaxis": f"y{at}", **of_view} for trace in made.traces]
            self._views += [name] * len(made.traces)
            for kind, added in (("shapes", made.shapes), ("annotations", made.annotations)):
                # A position is a number along the axis ("x2"), or a share of the panel ("x2 domain").
                refs = [{f"{axis}ref": f"{axis}{at}{each.pop(axis + 'whole', '')}" for axis in "xy"} for each in added]
                self.layout[kind] += [{**each, **ref} for each, ref in zip(added, refs, strict=True)]
            if isinstance(content, Rectangles):
                self.facts = facts(content, [f"xaxis{at}", f"yaxis{at}"], panel.y.scale)

    def _add_switch(self, names: list[str]) -> None:
        """Add buttons at the top left that switch between the views."""
        visible = {name: [view in (None, name) for view in self._views] for name in names}
        buttons = [{"label": f"by {name}", "method": "restyle", "args": [{"visible": visible[name]}]} for name in names]
        place = {"x": 0, "xanchor": "left", "y": 1.01, "yanchor": "bottom"}
        self.layout["updatemenus"] = [
            {"type": "buttons", "direction": "right", "active": 0, **place, "buttons": buttons}
        ]


def _axis(axis: Axis) -> dict[str, Any]:
    made = {"title": {"text": axis.words}, "range": axis.drawn, "showgrid": axis.grid, "gridcolor": GRID}
    if axis.ticks is not None:
        names = [html.escape(name) for name in axis.ticks.values()]
        made |= {"tickvals": list(axis.ticks), "ticktext": names, "zeroline": False, "automargin": True}
        return {**made, "fixedrange": len(names) == 1}  # with one row there is nothing to zoom into
    if axis.unit:
        return made
    few = {"dtick": 1} if axis.high - axis.low <= _FEW else {}  # no ticks at halves, which the format would round
    return {**made, "tickformat": ",.0f", "hoverformat": ",.2f", **few}


class _PlotlyParts(NamedTuple):
    """Traces, shapes and annotations for one piece of content.

    The key "xwhole" or "ywhole" in a shape or annotation says that its position on that axis is a share of the panel.
    """

    traces: list[dict[str, Any]] = []
    shapes: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []


@singledispatch
def _made(content: object, x: Axis, y: Axis) -> _PlotlyParts:
    raise AssertionError(f"no drawing of {type(content)}")


@_made.register(Stack)
def _stack(stack: Stack, x: Axis, y: Axis) -> _PlotlyParts:
    shown = [at for at, level in enumerate(stack.levels) if level.any()]
    return _PlotlyParts(
        [
            {
                **{"name": html.escape(stack.groups[at].label), "fillcolor": stack.groups[at].colour},
                **{"x": stack.x, "y": stack.levels[at] / y.scale, "hovertemplate": f"%{{y:.3f}} {y.unit[0]}"},
                **{"mode": "lines", "line": {"width": 0, "shape": "hv"}, "stackgroup": "all"},
            }
            for at in shown
        ]
    )


@_made.register(model.Steps)
def _steps(steps: model.Steps, x: Axis, y: Axis) -> _PlotlyParts:
    line = {"width": 0.5, "shape": "hv", "color": "rgba(51, 51, 51, 0.5)"}
    made = {"name": steps.name, "x": steps.x, "y": steps.y / y.scale, "mode": "lines", "line": line}
    words = [html.escape(each) for each in steps.words]
    template = f"<b>%{{y:.3f}} {y.unit[0]}</b><br>%{{customdata}}"
    return _PlotlyParts([{**made, "customdata": words, "hovertemplate": template, "showlegend": False}])


@_made.register(model.Bars)
def _bars(bars: model.Bars, x: Axis, y: Axis) -> _PlotlyParts:
    made: dict[str, Any] = {
        **{"type": "bar", "orientation": "h", "width": bars.thickness, "offset": -bars.thickness / 2},
        **{"base": bars.begin / x.scale, "x": bars.length / x.scale, "y": bars.row},
        "marker": {"color": bars.colours, "line": {"width": 0}},
        "customdata": [html.escape(each) for each in bars.words],
        "hovertemplate": "%{customdata}<extra></extra>",
        "showlegend": bars.group is not None,
    }
    if bars.group is not None:
        pattern = {"shape": "/", "fgcolor": "white", "size": 6} if bars.group.hatched else {}
        made["marker"] |= {"color": bars.group.colour, "pattern": pattern}
        made |= {"name": bars.group.label, "legend": "legend2"}
    if bars.names:  # plotly leaves out a name that does not fit
        made |= {"textposition": "inside", "insidetextanchor": "middle", "textangle": 0}
        made["text"] = [html.escape(name) for name in bars.names]
        made["insidetextfont"] = {"color": ["white" if is_dark(colour) else INK for colour in bars.colours]}
    return _PlotlyParts([made])


@_made.register(Rectangles)
def _rectangles(drawn: Rectangles, x: Axis, y: Axis) -> _PlotlyParts:
    """Draw rectangles, in one trace for each group.

    If there are more than `_RECTANGLES`, draw a raster of all, and only the largest rectangles on top of it.
    """
    traces = [_raster(drawn, x, y)] if len(drawn.of) > _RECTANGLES else []
    rows = largest(drawn, _RECTANGLES)
    for index in np.unique(drawn.of).tolist():
        mine, group = rows[drawn.of[rows] == index], drawn.groups[index]
        across, up = _corners(np.stack([drawn.lower, drawn.upper, drawn.start, drawn.stop], axis=1)[mine], y)
        # A rectangle narrower than a pixel is visible by its hairline border alone.
        looks = {"fill": "toself", "fillcolor": group.colour, "line": {"width": 0.5, "color": group.colour}}
        name = {"name": html.escape(group.label), "hoverinfo": "skip"}
        traces.append({"x": across, "y": up, "mode": "lines", **looks, **name})
    return _PlotlyParts(traces)


@_made.register(model.Outlines)
def _outlines(outlines: model.Outlines, x: Axis, y: Axis) -> _PlotlyParts:
    across, up = _corners(outlines.boxes, y)
    looks = {"mode": "lines", "line": {"width": 0.5, "color": "white"}, "hoverinfo": "skip", "showlegend": False}
    return _PlotlyParts([{"x": across, "y": up, **looks}])


def _corners(boxes: np.ndarray, y: Axis) -> tuple[np.ndarray, np.ndarray]:
    """Return x and y of boxes' corners: for each box all four, the first again, and NaN for a gap.

    A box is a row (lower, upper, start, stop), as in `Rectangles`: its left, right, bottom and top.
    """
    left, right, low, high = boxes.T
    gap = np.full(len(boxes), np.nan)
    across = np.stack([left, right, right, left, left, gap], axis=1).ravel()
    return across, np.stack([low, low, high, high, low, gap], axis=1).ravel() / y.scale


def _raster(drawn: Rectangles, x: Axis, y: Axis) -> dict[str, Any]:
    across, up = (x.high - x.low) / _PIXELS[1], y.drawn[1] / _PIXELS[0]
    colours = ["rgba(255,255,255,0)", *(group.colour for group in drawn.groups)]
    edges = pairwise(np.linspace(0, 1, len(colours) + 1).tolist())
    return {
        **{"type": "heatmap", "z": raster(drawn, (x.low, x.high), y.high, _PIXELS)},
        **{"x0": x.low + across / 2, "dx": across, "y0": up / 2, "dy": up},
        **{"zmin": 0, "zmax": len(drawn.groups), "showscale": False, "hoverinfo": "skip"},
        "colorscale": [(edge, colour) for colour, ends in zip(colours, edges, strict=True) for edge in ends],
    }


@_made.register(model.Spaces)
def _spaces(spaces: model.Spaces, x: Axis, y: Axis) -> _PlotlyParts:
    looks = {"type": "rect", "line": {"width": 1, "dash": "dot", "color": INK}, "legendgroup": spaces.label}
    boxes = [
        {"x0": left, "x1": right, "y0": low / y.scale, "y1": high / y.scale, "name": spaces.label, "showlegend": not at}
        for at, (left, right, low, high) in enumerate(spaces.boxes)
    ]
    return _PlotlyParts(shapes=[{**looks, **box} for box in boxes])


@_made.register(model.Line)
def _line(line: model.Line, x: Axis, y: Axis) -> _PlotlyParts:
    style = {"color": line.colour, "width": 1, "dash": "dash" if line.dashed else "solid"}
    made = {"type": "line", "line": style}
    if line.x is not None:
        return _PlotlyParts(
            shapes=[{**made, "x0": line.x, "x1": line.x, "y0": 0, "y1": 1, "ywhole": " domain", "layer": "below"}]
        )
    at = line.y / y.scale
    side = {"x": 0, "xanchor": "left"} if line.label_left else {"x": 1, "xanchor": "right"}
    label = {"text": html.escape(line.label), **side, "y": at, "yanchor": "bottom", "showarrow": False}
    return _PlotlyParts(
        shapes=[{**made, "x0": 0, "x1": 1, "y0": at, "y1": at, "xwhole": " domain"}],
        annotations=[{**label, "xwhole": " domain"}] if line.label else [],
    )


@_made.register(model.Callout)
def _mark(mark: model.Callout, x: Axis, y: Axis) -> _PlotlyParts:
    right = 2 * mark.x > x.low + x.high
    side = {"xanchor": "right" if right else "left", "ax": -20 if right else 20, "ay": -22}
    looks = {"arrowhead": 2, "arrowcolor": PEAK, "font": {"color": PEAK}, "bgcolor": "white"}
    return _PlotlyParts(
        annotations=[{"x": mark.x, "y": mark.y / y.scale, "text": html.escape(mark.text), **side, **looks}]
    )
