"""The map of a plan as one HTML page that needs no network: zoom, and what lies under the pointer in words."""

from __future__ import annotations

import base64
import html
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from memplug.plan.schema import MemoryPlan
from memplug.show import decision_bars
from memplug.show.decision_bars import Bars
from memplug.show.groups import GRID, INK, PEAK, Group, by_phase, layer_colours, phase_letters, phase_words, short_names
from memplug.show.layout_map import LayoutMap, largest, layout_map, raster
from memplug.show.page import require_plotly, strip, whole_page
from memplug.show.timeline import Runs
from memplug.show.words import axis_unit, has_addresses, plan_heading, size

if TYPE_CHECKING:
    import plotly.graph_objects as go

_PIXELS = (600, 1200)  # of the raster below the rectangles
_RECTANGLES = 15_000  # drawn as such, the largest
_MAP = "y2"
_MAP_WIDTH, _DECISIONS_LEFT = 0.56, 0.77  # shares of the width, where there are decisions; the legend is between
_DYNAMIC_AT_MOST = 12  # groups whose spaces are outlined; more would hide everything

# Which request lies under the pointer: all are looked through, which takes a millisecond for 300,000.
_SCRIPT = """
const map = document.getElementById('{plot_id}'), facts = JSON.parse(document.getElementById('facts').textContent);
const array = ([type, text]) =>
  new ({Int32Array, Float64Array})[type](Uint8Array.from(atob(text), c => c.charCodeAt(0)).buffer);
const [lower, upper, start, nbytes, phase, layer] =
  [facts.lower, facts.upper, facts.start, facts.nbytes, facts.phase, facts.layer].map(array);
const ids = facts.numbers ? array(facts.numbers) : facts.names;
const box = document.createElement('div');
box.style.cssText = 'position:fixed;display:none;background:white;border:1px solid #999;padding:4px 8px;' +
  'font:13px sans-serif;pointer-events:none;white-space:pre;z-index:9';
document.body.appendChild(box);
map.addEventListener('mousemove', event => {
  const layout = map._fullLayout, x = layout.xaxis, y = layout.yaxis2, frame = map.getBoundingClientRect();
  const across = event.clientX - frame.left - x._offset, down = event.clientY - frame.top - y._offset;
  const inside = 0 <= across && across < x._length && 0 <= down && down < y._length;
  const time = x.p2d(across), address = y.p2d(down) * facts.unit_bytes;
  const row = !inside ? -1 : lower.findIndex((from, i) =>
    from <= time && time < upper[i] && start[i] <= address && address < start[i] + nbytes[i]);
  box.style.display = row < 0 ? 'none' : 'block';
  if (row < 0) return;
  box.style.left = Math.min(event.clientX + 16, innerWidth - 360) + 'px';
  box.style.top = (event.clientY + 16) + 'px';
  const number = value => value.toLocaleString('en-US');
  const words = [`request ${ids[row]}: ${number(nbytes[row])} bytes at ${number(start[row])}`,
    `in use from ${facts.clock} ${number(lower[row])} up to ${number(upper[row])}`];
  if (phase[row] >= 0) words.push(facts.phases[phase[row]]);
  if (layer[row] >= 0) words.push(facts.layers[layer[row]]);
  box.textContent = words.join('\\n');
});
map.addEventListener('mouseleave', () => { box.style.display = 'none'; });
"""


def write_layout_page(plan: MemoryPlan, path: str | Path) -> None:
    """Writes a page of 6 MB for 10,000 requests, of which plotly's script is 4.8, and of 20 MB for 300,000.

    The decisions are beside the map; without addresses they are all that there is.

    Raises:
        MemplugError: plotly is not installed.
        OSError: The file cannot be written.
    """
    require_plotly()
    decided = decision_bars.bars(plan)
    if decided is not None and not has_addresses(plan):
        page = whole_page(_of_decisions(plan, decided), "layout", plan_heading(plan))
    else:
        drawn = layout_map(plan)
        _, unit_bytes = axis_unit(plan.solution.height)
        figure = _of_addresses(plan, drawn, decided)
        page = whole_page(figure, "layout", plan_heading(plan), _facts(plan, drawn, unit_bytes), [_SCRIPT])
    Path(path).write_text(page, encoding="utf-8")


def _of_decisions(plan: MemoryPlan, decided: Bars) -> go.Figure:
    import plotly.graph_objects as go

    figure = go.Figure()
    decision_bars.add(figure, decided, 0.0)
    figure.update_layout(title=_title(plan), template="plotly_white", margin={"l": 120, "r": 20, "t": 120, "b": 60})
    return figure


def _of_addresses(plan: MemoryPlan, drawn: LayoutMap, decided: Bars | None) -> go.Figure:
    """The map, beside it the decisions where there are any."""
    from plotly.subplots import make_subplots

    unit, unit_bytes = axis_unit(plan.solution.height)
    figure = make_subplots(
        rows=4, shared_xaxes=True, row_heights=[0.2, 0.72, 0.04, 0.04], vertical_spacing=0.012, specs=[[{}]] * 4
    )
    _add_curve(figure, plan, drawn, unit, unit_bytes)
    views = [_view(plan, drawn, name, unit_bytes, visible=at == 0) for at, name in enumerate(drawn.views)]
    for traces in views:
        figure.add_traces(traces, rows=2, cols=1)
    _add_strips(figure, plan, drawn)
    _lay_out(figure, plan, drawn, unit, unit_bytes)
    if decided is not None:
        _add_decisions(figure, decided)
    _add_switch(figure, [len(traces) for traces in views], tuple(drawn.views), 1.0 if decided is None else _MAP_WIDTH)
    return figure


def _add_decisions(figure: go.Figure, decided: Bars) -> None:
    """To the right of the map and its legend, which make room."""
    figure.update_xaxes(domain=[0, _MAP_WIDTH])
    figure.update_layout(legend={"x": _MAP_WIDTH + 0.01}, margin={"t": 120})
    decision_bars.add(figure, decided, _DECISIONS_LEFT)


def _title(plan: MemoryPlan) -> dict[str, Any]:
    return {"text": html.escape(plan_heading(plan)), "x": 0.01, "xanchor": "left", "y": 0.98, "yanchor": "top"}


def _facts(plan: MemoryPlan, drawn: LayoutMap, unit_bytes: int) -> str:
    """What the script looks up, as JSON that cannot end its element."""
    problem = plan.problem
    numbered = problem.ids.dtype.kind == "i"
    values = {
        "lower": drawn.lower,
        "upper": drawn.upper,
        "start": drawn.start,
        "nbytes": problem.buffers["size"],
        "phase": problem.buffers["lower_phase"],
        "layer": problem.buffers["lower_layer"],
    }
    facts: dict[str, Any] = {
        "unit_bytes": unit_bytes,
        "clock": _clock(plan),
        "numbers": _packed(problem.ids) if numbered else None,
        "names": None if numbered else problem.ids.tolist(),
        "phases": [f"asked for in {phase_words(phase)}" for phase in problem.phases],
        "layers": [layer.name for layer in problem.layers],
        **{name: _packed(column) for name, column in values.items()},
    }
    return f'<script id="facts" type="application/json">{json.dumps(facts).replace("<", chr(92) + "u003c")}</script>'


def _clock(plan: MemoryPlan) -> str:
    """What the axis counts."""
    return "event" if plan.problem.phases else "time"


def _packed(values: np.ndarray) -> tuple[str, str]:
    """The array's type in the page, and its bytes; whole numbers are exact up to 2**53 there."""
    small = bool((np.abs(values) < 2**31).all())
    dtype = np.int32 if small else np.float64
    text = base64.b64encode(np.ascontiguousarray(values, dtype).tobytes()).decode()
    return ("Int32Array" if small else "Float64Array", text)


def _view(plan: MemoryPlan, drawn: LayoutMap, name: str, unit_bytes: int, *, visible: bool) -> list[go.BaseTraceType]:
    """The map in the colours of one view: a raster of all requests, and the largest as shapes, a trace a group."""
    import plotly.graph_objects as go

    groups, of = drawn.views[name]
    seen = np.unique(of).tolist()
    pixels = raster(drawn, of + 1, plan.solution.height, _PIXELS)
    traces: list[go.BaseTraceType] = []
    if len(of) > _RECTANGLES:
        across, up = (drawn.end - drawn.begin) / _PIXELS[1], plan.solution.height / unit_bytes / _PIXELS[0]
        traces.append(
            go.Heatmap(
                z=pixels,
                x0=drawn.begin + across / 2,
                dx=across,
                y0=up / 2,
                dy=up,
                zmin=0,
                zmax=len(groups),
                colorscale=_scale(groups),
                showscale=False,
                hoverinfo="skip",
                visible=visible,
            )
        )
    rows = largest(drawn, _RECTANGLES)
    for index in seen:
        mine = rows[of[rows] == index]
        x, y = _outlines(drawn, mine, unit_bytes)
        traces.append(
            go.Scatter(
                x=x,
                y=y,
                fill="toself",
                mode="lines",
                # As wide as a hair: what is narrower than a pixel has its colour from the border.
                line={"width": 0.5, "color": groups[index].colour},
                fillcolor=groups[index].colour,
                name=html.escape(groups[index].label),
                hoverinfo="skip",
                visible=visible,
                legendgroup=name,
            )
        )
    return traces


def _outlines(drawn: LayoutMap, rows: np.ndarray, unit_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Corners of the rectangles, with a gap after each: float64[6 n]."""
    left, right = drawn.lower[rows].astype(np.float64), drawn.upper[rows].astype(np.float64)
    low, high = drawn.start[rows] / unit_bytes, drawn.stop[rows] / unit_bytes
    gap = np.full(len(rows), np.nan)
    x = np.stack([left, right, right, left, left, gap], axis=1).ravel()
    return x, np.stack([low, low, high, high, low, gap], axis=1).ravel()


def _scale(groups: tuple[Group, ...]) -> list[tuple[float, str]]:
    """Colours of the raster's values: nothing is transparent."""
    colours = ["rgba(255,255,255,0)", *(group.colour for group in groups)]
    steps = np.linspace(0, 1, len(colours) + 1)
    return [(float(edge), colour) for at, colour in enumerate(colours) for edge in steps[at : at + 2]]


def _add_curve(figure: go.Figure, plan: MemoryPlan, drawn: LayoutMap, unit: str, unit_bytes: int) -> None:
    import plotly.graph_objects as go

    figure.add_trace(
        go.Scatter(
            x=drawn.times,
            y=drawn.live / unit_bytes,
            fill="tozeroy",
            mode="lines",
            line={"width": 0, "shape": "hv"},
            fillcolor="#9fb4c7",
            hovertemplate=f"%{{y:.3f}} {unit} in use<extra></extra>",
            showlegend=False,
        ),
        row=1,
        col=1,
    )
    lines = ((plan.solution.height, INK, "solid"), (plan.problem.lower_bound, PEAK, "dash"))
    for nbytes, colour, dash in lines:
        figure.add_hline(y=nbytes / unit_bytes, line={"width": 1, "color": colour, "dash": dash}, row=1, col=1)
    if len(drawn.times):
        figure.add_annotation(
            x=float(drawn.times[drawn.peak]),
            y=plan.problem.lower_bound / unit_bytes,
            text=f"peak {size(plan.problem.lower_bound)}",
            font={"color": PEAK},
            arrowcolor=PEAK,
            arrowhead=2,
            ax=0,
            ay=-18,
            row=1,
            col=1,
        )


def _add_strips(figure: go.Figure, plan: MemoryPlan, drawn: LayoutMap) -> None:
    problem = plan.problem

    def moved(runs: Runs) -> Runs:
        return Runs(runs.start + drawn.begin, runs.end + drawn.begin, runs.value)

    if len(drawn.phase_runs.value):
        grouping = by_phase(problem.phases)
        colours = [grouping.groups[group].colour for group in grouping.of]
        words, letters = ([name(phase) for phase in problem.phases] for name in (phase_words, phase_letters))
        figure.add_trace(strip(moved(drawn.phase_runs), words, letters, colours, _clock(plan)), row=3, col=1)
    if len(drawn.layer_runs.value):
        names = [layer.name for layer in problem.layers]
        short, colours = short_names(problem.layers), layer_colours(len(problem.layers))
        figure.add_trace(strip(moved(drawn.layer_runs), names, short, colours, _clock(plan)), row=4, col=1)


def _lay_out(figure: go.Figure, plan: MemoryPlan, drawn: LayoutMap, unit: str, unit_bytes: int) -> None:
    top = plan.solution.height / unit_bytes or 1
    figure.update_layout(
        title=_title(plan),
        template="plotly_white",
        bargap=0,
        legend={"y": 0.78, "yanchor": "top", "traceorder": "reversed"},
        uniformtext={"minsize": 9, "mode": "hide"},
        margin={"l": 80, "r": 20, "t": 90, "b": 60},
    )
    figure.update_xaxes(range=[drawn.begin, drawn.end], tickformat=",.0f", showgrid=False)
    clock = "event of the step, running number" if _clock(plan) == "event" else "time"
    figure.update_xaxes(title={"text": clock}, row=4, col=1)
    figure.update_yaxes(title={"text": f"in use, {unit}"}, range=[0, 1.35 * top], gridcolor=GRID, row=1, col=1)
    figure.update_yaxes(title={"text": f"address, {unit}"}, range=[0, top], showgrid=False, row=2, col=1)
    for row, name, runs in ((3, "phase", drawn.phase_runs), (4, "layer", drawn.layer_runs)):
        shown = {"tickvals": [0], "ticktext": [name]} if len(runs.value) else {"visible": False}
        figure.update_yaxes(fixedrange=True, showgrid=False, range=[-0.5, 0.5], row=row, col=1, **shown)
    figure.update_layout(
        shapes=[
            *figure.layout.shapes,
            *(
                {
                    "type": "rect",
                    "xref": "x2",
                    "yref": _MAP,
                    "x0": group.lower,
                    "x1": group.upper,
                    "y0": start / unit_bytes,
                    "y1": end / unit_bytes,
                    "line": {"width": 1, "dash": "dot", "color": INK},
                }
                for group in plan.dynamic[:_DYNAMIC_AT_MOST]
                for start, end in group.spaces
            ),
        ]
    )


def _add_switch(figure: go.Figure, counts: list[int], names: tuple[str, ...], right: float) -> None:
    """Buttons up to the map's right edge."""
    if len(names) < 2:
        return
    after = len(figure.data) - 1 - sum(counts)
    buttons = []
    for chosen in range(len(names)):
        shown = [at == chosen for at, count in enumerate(counts) for _ in range(count)]
        visible = [True, *shown, *[True] * after]
        buttons.append({"label": f"by {names[chosen]}", "method": "restyle", "args": [{"visible": visible}]})
    figure.update_layout(
        updatemenus=[
            {
                "type": "buttons",
                "direction": "right",
                "x": right,
                "xanchor": "right",
                "y": 1.01,
                "yanchor": "bottom",
                "buttons": buttons,
            }
        ]
    )
