"""A trace's memory timeline as one HTML page that needs no network: zoom, hover, and a switch from phases to layers."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    phase_letters,
    phase_words,
    short_names,
)
from memplug.show.timeline import Runs, Timeline, timeline
from memplug.show.words import axis_unit, heading, moment, sampling, size

if TYPE_CHECKING:
    import plotly.graph_objects as go

# Plotly's own "responsive" does the same 100 ms later: a page printed or captured in between has an empty band.
_FOLLOW_WINDOW = "addEventListener('resize', () => Plotly.relayout('{plot_id}', {autosize: true}));"


def write_page(trace: Trace, path: str | Path) -> None:
    """Writes a page of 5 to 8 MB, of which plotly's script is 4.8.

    Raises:
        MemplugError: plotly is not installed.
        OSError: The file cannot be written.
    """
    require_plotly()
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    line = timeline(trace)
    figure = make_subplots(rows=3, shared_xaxes=True, row_heights=[0.9, 0.05, 0.05], vertical_spacing=0.015)
    unit, unit_bytes = axis_unit(int(line.in_use_bytes.max()))
    by_phase = _bands(line, line.bytes_by_phase / unit_bytes, line.phases.groups, unit, visible=True)
    by_layer = _bands(line, line.bytes_by_layer / unit_bytes, line.layers.groups, unit, visible=False)
    figure.add_traces([go.Scatter(band) for band in (*by_phase, *by_layer)], rows=1, cols=1)
    figure.add_trace(go.Scatter(_total(trace, line, unit, unit_bytes)), row=1, col=1)
    _add_strips(figure, trace, line)
    _lay_out(figure, trace, line, unit)
    _mark_peak(figure, trace, line, unit_bytes)
    _add_switch(figure, len(by_phase), len(by_layer))
    Path(path).write_text(whole_page(figure, "memory", heading(trace)), encoding="utf-8")


def require_plotly() -> None:
    """Raises a MemplugError where plotly is not installed."""
    try:
        import plotly.graph_objects  # noqa: F401
    except ImportError:
        raise MemplugError(
            "a page needs plotly, which is not installed", "Run `pip install 'memplug[pictures]'`."
        ) from None


def whole_page(figure: go.Figure, div_id: str, title: str, head: str = "", scripts: Sequence[str] = ()) -> str:
    """A page that its figure fills, whatever the window's size, and that never scrolls.

    Args:
        figure: without a height of its own.
        div_id: of the element that plotly draws into.
        title: of the window; escaped here.
        head: markup for the end of the page's head.
        scripts: what runs once the figure is drawn; plotly puts `div_id` in place of {plot_id}.
    """
    page = figure.to_html(
        include_plotlyjs=True,
        div_id=div_id,
        default_height="100vh",
        config={"displaylogo": False, "scrollZoom": True},
        post_script=[_FOLLOW_WINDOW, *scripts],
    )
    # The encoding first: a browser looks for it in the first kilobyte only. Without the margins that browsers give a
    # body, its height is the window's.
    first = f'<head><meta charset="utf-8"><title>{html.escape(title)}</title><style>body {{margin: 0}}</style>'
    return page.replace("<head>", first + head, 1)


def _bands(line: Timeline, levels: np.ndarray, groups: tuple[Group, ...], unit: str, visible: bool) -> list[dict]:
    """Stacked areas, from the bottom up; `levels` in the unit of the axis."""
    return [
        {
            "name": group.label,
            "x": line.at,
            "y": level,
            "stackgroup": "phases" if visible else "layers",
            "mode": "lines",
            "line": {"width": 0, "shape": "hv"},
            "fillcolor": group.colour,
            "hovertemplate": f"%{{y:.3f}} {unit}",
            "visible": visible,
        }
        for group, level in zip(groups, levels, strict=True)
        if level.any()
    ]


def _total(trace: Trace, line: Timeline, unit: str, unit_bytes: int) -> dict[str, Any]:
    return {
        "name": "in use",
        "x": line.at,
        "y": line.in_use_bytes / unit_bytes,
        "mode": "lines",
        "line": {"width": 0.5, "shape": "hv", "color": "rgba(51, 51, 51, 0.5)"},
        "customdata": [html.escape(str(moment(trace, event))) for event in line.event.tolist()],
        "hovertemplate": f"<b>%{{y:.3f}} {unit}</b><br>%{{customdata}}",
        "showlegend": False,
    }


def _add_strips(figure: go.Figure, trace: Trace, line: Timeline) -> None:
    words, letters = ([name(phase) for phase in trace.phases] for name in (phase_words, phase_letters))
    colours = [line.phases.groups[group].colour for group in line.phases.of]
    figure.add_trace(strip(line.phase_runs, words, letters, colours, line.clock), row=2, col=1)
    names = short_names(trace.layers)
    full_names = [layer.name + (" (dynamic)" if layer.dynamic else "") for layer in trace.layers]
    colours = layer_colours(len(names))
    figure.add_trace(strip(line.layer_runs, full_names, names, colours, line.clock), row=3, col=1)


def strip(runs: Runs, words: list[str], labels: list[str], colours: list[str], clock: str) -> go.Bar:
    """What ran, as a row of coloured stretches; a label that does not fit is left out. Words are escaped here.

    Args:
        runs: the stretches.
        words: of each value, shown under the pointer.
        labels: of each value, short.
        colours: of each value.
        clock: what the axis counts, such as "operator".
    """
    import plotly.graph_objects as go

    inside = np.flatnonzero(runs.value >= 0)
    values = runs.value[inside].tolist()
    return go.Bar(
        orientation="h",
        base=runs.start[inside],
        x=(runs.end - runs.start)[inside],
        y=np.zeros(len(inside)),
        width=1,
        marker={"color": [colours[value] for value in values], "line": {"width": 0}},
        text=[labels[value] for value in values],
        textposition="inside",
        insidetextanchor="middle",
        insidetextfont={"color": ["white" if is_dark(colours[value]) else INK for value in values]},
        textangle=0,
        customdata=[html.escape(words[value]) for value in values],
        hovertemplate=f"%{{customdata}}: from {clock} %{{base:,}} up to %{{x:,}}<extra></extra>",
        showlegend=False,
    )


def _lay_out(figure: go.Figure, trace: Trace, line: Timeline, unit: str) -> None:
    figure.update_layout(
        title={
            "text": html.escape(heading(trace)),
            "subtitle": {"text": sampling(trace, line)},
            "x": 0.01,
            "xanchor": "left",
            "y": 0.97,
            "yanchor": "top",
        },
        template="plotly_white",
        hovermode="x unified",
        bargap=0,
        legend={"traceorder": "reversed", "y": 1, "yanchor": "top", "title": {"text": "asked for by"}},
        uniformtext={"minsize": 9, "mode": "hide"},
        margin={"l": 80, "r": 20, "t": 125, "b": 60},
    )
    figure.update_xaxes(range=[0, max(line.length, 1)], tickformat=",.0f", hoverformat=",.2f", showgrid=False)
    figure.update_xaxes(title={"text": f"{line.clock}, running number"}, row=3, col=1)
    top = 1.16 * float(line.in_use_bytes.max()) / axis_unit(int(line.in_use_bytes.max()))[1]
    figure.update_yaxes(title={"text": f"memory in use, {unit}"}, range=[0, top or 1], row=1, col=1)
    for row, name in ((2, "phase"), (3, "layer")):
        figure.update_yaxes(tickvals=[0], ticktext=[name], fixedrange=True, showgrid=False, row=row, col=1)
    boundaries = line.phase_runs.start[1:] if len(line.phase_runs.start) <= LINES_AT_MOST else ()
    lines = [(int(at), {"color": GRID, "width": 1}) for at in boundaries]
    lines += [(at, {"color": INK, "width": 1, "dash": "dash"}) for at in line.step_starts[1:]]
    figure.update_layout(
        shapes=[
            {"type": "line", "x0": at, "x1": at, "yref": "y domain", "y0": 0, "y1": 1, "layer": "below", "line": style}
            for at, style in lines
        ]
    )


def _mark_peak(figure: go.Figure, trace: Trace, line: Timeline, unit_bytes: int) -> None:
    x, nbytes = float(line.at[line.peak]), int(line.in_use_bytes[line.peak])
    right = x > line.length / 2
    figure.add_annotation(
        x=x,
        y=nbytes / unit_bytes,
        text=html.escape(f"peak {size(nbytes)}: {moment(trace, int(line.event[line.peak]))}"),
        xanchor="right" if right else "left",
        ax=-20 if right else 20,
        ay=-22,
        arrowhead=2,
        arrowcolor=PEAK,
        font={"color": PEAK},
        bgcolor="white",
    )


def _add_switch(figure: go.Figure, phases: int, layers: int) -> None:
    others = len(figure.data) - phases - layers
    views = (("by phase", True), ("by layer", False))
    figure.update_layout(
        updatemenus=[
            {
                "type": "buttons",
                "direction": "right",
                "active": 0,
                "x": 0,
                "xanchor": "left",
                "y": 1.01,
                "yanchor": "bottom",
                "buttons": [
                    {
                        "label": label,
                        "method": "restyle",
                        "args": [{"visible": [first] * phases + [not first] * layers + [True] * others}],
                    }
                    for label, first in views
                ],
            }
        ]
    )
