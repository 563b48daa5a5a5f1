"""A trace's memory timeline as a figure: memory by phase and by layer, above the phases and layers that ran."""

from __future__ import annotations

from memplug.figures.clock import strips
from memplug.figures.figure import GRID, Axis, Callout, Column, Figure, Line, Panel, Stack, Steps, bytes_axis
from memplug.profile.trace import Trace
from memplug.show.timeline import timeline
from memplug.show.words import heading, moment, sampling
from memplug.words import size

_BOUNDARIES_AT_MOST = 80  # draw no phase boundaries if there are more: they would merge
_ROOM = 1.16  # height of the axis as a multiple of the peak, with space for the peak's label


def trace_figure(trace: Trace, bins: int = 800) -> Figure:
    """Return a figure of a trace's memory in use.

    Args:
        trace: The trace.
        bins: Number of equal parts of the clock to sample; one for each pixel across is enough.
    """
    line = timeline(trace, bins)
    peak_bytes = int(line.in_use_bytes[line.peak])
    peak = f"peak {size(peak_bytes)}: {moment(trace, int(line.event[line.peak]))}"
    boundaries = line.phase_runs.start[1:] if len(line.phase_runs.start) <= _BOUNDARIES_AT_MOST else ()
    in_use = Panel(
        y=bytes_axis("memory in use", peak_bytes, _ROOM),
        height=24,
        views={
            "phase": Stack(line.at, line.bytes_by_phase, line.phases.groups),
            "layer": Stack(line.at, line.bytes_by_layer, line.layers.groups),
        },
        pictured=2,
        content=(
            *(Line(x=int(at), colour=GRID) for at in boundaries),
            *(Line(x=at, dashed=True) for at in line.step_starts[1:]),
            Steps(line.at, line.in_use_bytes, "in use", [str(moment(trace, event)) for event in line.event.tolist()]),
            Callout(float(line.at[line.peak]), peak_bytes, peak),
        ),
    )
    clock = Axis(title=f"{line.clock}, running number", low=0, high=max(line.length, 1))
    below = strips(trace.phases, trace.layers, line.phase_runs, line.layer_runs, line.clock)
    return Figure(
        title=heading(trace),
        subtitle=sampling(trace, line),
        legend="asked for by",
        columns=(Column(x=clock, panels=(in_use, *below)),),
    )
