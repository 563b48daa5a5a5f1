"""A figure as one HTML page that needs no network: zoom, hover, and a switch between the views; by plotly."""

from __future__ import annotations

import html
from functools import singledispatch
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from memplug.errors import MemplugError
from memplug.show import figure as model
from memplug.show.figure import GRID, INK, PEAK, Axis, Column, Figure, Panel, Rectangles, Stack
from memplug.show.groups import is_dark
from memplug.show.page_hover import SCRIPT, facts
from memplug.show.raster import largest, raster

_SPACING = 0.013  # between panels, of the height
_LEGEND = 0.21  # between columns, of the width
_BELOW_TITLE = 0.9  # of the height: the legend of bars is above
_PIXELS = (600, 1200)  # of the raster below the rectangles
_RECTANGLES = 15_000  # drawn as such, the largest
# Plotly's own "responsive" does the same 100 ms later: a page printed or captured in between has an empty band.
_FOLLOW_WINDOW = "addEventListener('resize', () => Plotly.relayout('{plot_id}', {autosize: true}));"


def write_page(figure: Figure, path: str | Path) -> None:
    """Writes a page of 5 to 8 MB, of which plotly's script is 4.8, and of 20 MB for 300,000 rectangles.

    It fills the window, whatever its size, and never scrolls.

    Raises:
        MemplugError: plotly is not installed.
        OSError: The file cannot be written.
    """
    try:
        import plotly.graph_objects as go
    except ImportError:
        raise MemplugError(
            "a page needs plotly, which is not installed", "Run `pip install 'memplug[pictures]'`."
        ) from None
    drawn = _Page(figure)
    page = go.Figure(drawn.traces, drawn.layout).to_html(
        include_plotlyjs=True,
        div_id="figure",
        default_height="100vh",
        config={"displaylogo": False, "scrollZoom": True},
        post_script=[_FOLLOW_WINDOW, *([SCRIPT] if drawn.facts else [])],
    )
    # The encoding first: a browser looks for it in the first kilobyte only. Without the margins that browsers give a
    # body, its height is the window's.
    first = f'<meta charset="utf-8"><title>{html.escape(figure.title)}</title><style>body {{margin: 0}}</style>'
    Path(path).write_text(page.replace("<head>", f"<head>{first}{drawn.facts}", 1), encoding="utf-8")


class _Page:
    """What plotly draws, made panel by panel.

    Attributes:
        traces, layout: plotly's.
        facts: markup for the script that tells which rectangle lies under the pointer; empty: there are none.
    """

    def __init__(self, figure: Figure) -> None:
        self.traces: list[dict[str, Any]] = []
        self.facts = ""
        self._views: list[str | None] = []  # of each trace
        self._axes = 0
        views = [(name, view) for each in figure.columns for panel in each.panels for name, view in panel.views.items()]
        title = {"text": html.escape(figure.title), "subtitle": {"text": html.escape(figure.subtitle)}}
        self.layout: dict[str, Any] = {
            "title": {**title, "x": 0.01, "xanchor": "left", "y": 0.97, "yanchor": "top"},
            "template": "plotly_white",
            "hovermode": "x unified" if any(isinstance(view, Stack) for _, view in views) else "closest",
            "bargap": 0,
            "barmode": "overlay",
            "legend": {"traceorder": "reversed", "yanchor": "top", "title": {"text": html.escape(figure.legend)}},
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
        if len(views) > 1:
            self._add_switch([name for name, _ in views])

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
            self._add_panel(panel, column.x, at)
            if panel.views:
                self.layout["legend"] |= {"x": right + 0.01, "y": top}
            if panel.title:
                text = "<br>".join(map(html.escape, panel.title))
                place = {"x": left, "xanchor": "left", "yanchor": "bottom"}
                paper = {"xref": "paper", "yref": "paper", "y": 1, "align": "left", "showarrow": False}
                self.layout["annotations"].append({**place, **paper, "text": text})
                self.layout["legend2"] = {**place, "y": top + 0.005, "orientation": "h"}
            top = bottom - _SPACING

    def _add_panel(self, panel: Panel, x: Axis, at: str) -> None:
        drawn = [(name, view) for name, view in panel.views.items()] + [(None, content) for content in panel.content]
        for name, content in drawn:
            made = _drawn(content, x, panel.y)
            shown = {} if name is None else {"visible": name == drawn[0][0]}
            group = {} if name is None else {"stackgroup" if isinstance(content, Stack) else "legendgroup": name}
            self.traces += [{**trace, "xaxis": f"x{at}", "yaxis": f"y{at}", **shown, **group} for trace in made.traces]
            self._views += [name] * len(made.traces)
            for kind, added in (("shapes", made.shapes), ("annotations", made.annotations)):
                # Across the panel, or along its axes.
                refs = [{f"{axis}ref": f"{axis}{at}{each.pop(axis + 'whole', '')}" for axis in "xy"} for each in added]
                self.layout[kind] += [{**each, **ref} for each, ref in zip(added, refs, strict=True)]
            if isinstance(content, Rectangles):
                self.facts = facts(content, [f"xaxis{at}", f"yaxis{at}"], panel.y.scale)

    def _add_switch(self, names: list[str]) -> None:
        """Buttons above the left edge."""
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
        return {**made, "fixedrange": len(names) == 1}  # a strip has nothing to zoom into
    return made if axis.unit else {**made, "tickformat": ",.0f", "hoverformat": ",.2f"}


class _Drawn(NamedTuple):
    """Plotly's words for something; "xwhole" or "ywhole" in a shape or annotation: placed by shares of the panel."""

    traces: list[dict[str, Any]] = []
    shapes: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []


@singledispatch
def _drawn(content: object, x: Axis, y: Axis) -> _Drawn:
    raise AssertionError(f"no drawing of {type(content)}")


@_drawn.register(Stack)
def _stack(stack: Stack, x: Axis, y: Axis) -> _Drawn:
    shown = [at for at, level in enumerate(stack.levels) if level.any()]
    return _Drawn(
        [
            {
                **{"name": html.escape(stack.groups[at].label), "fillcolor": stack.groups[at].colour},
                **{"x": stack.x, "y": stack.levels[at] / y.scale, "hovertemplate": f"%{{y:.3f}} {y.unit[0]}"},
                **{"mode": "lines", "line": {"width": 0, "shape": "hv"}, "stackgroup": "all"},
            }
            for at in shown
        ]
    )


@_drawn.register(model.Steps)
def _steps(steps: model.Steps, x: Axis, y: Axis) -> _Drawn:
    line = {"width": 0.5, "shape": "hv", "color": "rgba(51, 51, 51, 0.5)"}
    made = {"name": steps.name, "x": steps.x, "y": steps.y / y.scale, "mode": "lines", "line": line}
    words = [html.escape(each) for each in steps.words]
    template = f"<b>%{{y:.3f}} {y.unit[0]}</b><br>%{{customdata}}"
    return _Drawn([{**made, "customdata": words, "hovertemplate": template, "showlegend": False}])


@_drawn.register(model.Bars)
def _bars(bars: model.Bars, x: Axis, y: Axis) -> _Drawn:
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
    if bars.names:  # one that does not fit is left out
        made |= {"textposition": "inside", "insidetextanchor": "middle", "textangle": 0}
        made["text"] = [html.escape(names[-1]) for names in bars.names]
        made["insidetextfont"] = {"color": ["white" if is_dark(colour) else INK for colour in bars.colours]}
    return _Drawn([made])


@_drawn.register(Rectangles)
def _rectangles(drawn: Rectangles, x: Axis, y: Axis) -> _Drawn:
    """A raster of all where there are many, and the largest as shapes, a trace a group."""
    traces = [_raster(drawn, x, y)] if len(drawn.of) > _RECTANGLES else []
    rows = largest(drawn, _RECTANGLES)
    for index in np.unique(drawn.of).tolist():
        mine, group = rows[drawn.of[rows] == index], drawn.groups[index]
        left, right, low, high = (side[mine] for side in (drawn.lower, drawn.upper, drawn.start, drawn.stop))
        gap = np.full(len(mine), np.nan)  # after the corners of each
        across = np.stack([left, right, right, left, left, gap], axis=1).ravel()
        up = np.stack([low, low, high, high, low, gap], axis=1).ravel() / y.scale
        # As wide as a hair: what is narrower than a pixel has its colour from the border.
        looks = {"fill": "toself", "fillcolor": group.colour, "line": {"width": 0.5, "color": group.colour}}
        name = {"name": html.escape(group.label), "hoverinfo": "skip"}
        traces.append({"x": across, "y": up, "mode": "lines", **looks, **name})
    return _Drawn(traces)


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


@_drawn.register(model.Spaces)
def _spaces(spaces: model.Spaces, x: Axis, y: Axis) -> _Drawn:
    looks = {"type": "rect", "line": {"width": 1, "dash": "dot", "color": INK}, "legendgroup": spaces.label}
    boxes = [
        {"x0": left, "x1": right, "y0": low / y.scale, "y1": high / y.scale, "name": spaces.label, "showlegend": not at}
        for at, (left, right, low, high) in enumerate(spaces.boxes)
    ]
    return _Drawn(shapes=[{**looks, **box} for box in boxes])


@_drawn.register(model.Line)
def _line(line: model.Line, x: Axis, y: Axis) -> _Drawn:
    style = {"color": line.colour, "width": 1, "dash": "dash" if line.dashed else "solid"}
    made = {"type": "line", "line": style}
    if line.x is not None:
        return _Drawn(
            shapes=[{**made, "x0": line.x, "x1": line.x, "y0": 0, "y1": 1, "ywhole": " domain", "layer": "below"}]
        )
    at = line.y / y.scale
    side = {"x": 0, "xanchor": "left"} if line.label_left else {"x": 1, "xanchor": "right"}
    label = {"text": html.escape(line.label), **side, "y": at, "yanchor": "bottom", "showarrow": False}
    return _Drawn(
        shapes=[{**made, "x0": 0, "x1": 1, "y0": at, "y1": at, "xwhole": " domain"}],
        annotations=[{**label, "xwhole": " domain"}] if line.label else [],
    )


@_drawn.register(model.Mark)
def _mark(mark: model.Mark, x: Axis, y: Axis) -> _Drawn:
    right = 2 * mark.x > x.low + x.high
    side = {"xanchor": "right" if right else "left", "ax": -20 if right else 20, "ay": -22}
    looks = {"arrowhead": 2, "arrowcolor": PEAK, "font": {"color": PEAK}, "bgcolor": "white"}
    return _Drawn(annotations=[{"x": mark.x, "y": mark.y / y.scale, "text": html.escape(mark.text), **side, **looks}])
