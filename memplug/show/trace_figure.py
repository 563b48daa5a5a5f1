"""A trace's memory timeline as a figure: by phase, by layer, and what ran along the clock."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memplug.profile.trace import Layer, Phase, Trace
from memplug.show.figure import GRID, Axis, Bars, Column, Figure, Line, Mark, Panel, Runs, Stack, Steps, bytes_axis
from memplug.show.groups import by_phase, phase_letters, phase_words, sequence, short_names
from memplug.show.timeline import timeline
from memplug.show.words import heading, moment, sampling
from memplug.words import size

_BOUNDARIES_AT_MOST = 80  # of phases, that still look like lines
_ROOM = 1.16  # above the peak, for its label


def trace_figure(trace: Trace, bins: int = 800) -> Figure:
    """Memory in use in a trace, from as many `bins` as the picture has pixels."""
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
            Mark(float(line.at[line.peak]), peak_bytes, peak),
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


def strips(
    phases: Sequence[Phase], layers: Sequence[Layer], phase_runs: Runs, layer_runs: Runs, clock: str
) -> list[Panel]:
    """The phases and the layers that ran, as far as anything is known of them, as rows of coloured stretches.

    The tables have what the runs refer to; their ends count the clock, such as "operator".
    """
    groups, short = by_phase(phases), short_names(layers)
    # Of each: the colour, the words under the pointer, and the name.
    phase_looks = [
        (groups.groups[group].colour, phase_words(phase), phase_letters(phase))
        for phase, group in zip(phases, groups.of[:-1], strict=True)
    ]
    layer_looks = [
        (colour, layer.name + (" (dynamic)" if layer.dynamic else ""), name)
        for colour, layer, name in zip(sequence(len(short)), layers, short, strict=True)
    ]
    return [
        Panel(y=Axis(title="", low=-0.5, high=0.5, ticks={0: what}), height=1, content=(_strip(clock, runs, looks),))
        for what, runs, looks in (("phase", phase_runs, phase_looks), ("layer", layer_runs, layer_looks))
        if len(runs.value)
    ]


def _strip(clock: str, runs: Runs, looks: list[tuple[str, str, str]]) -> Bars:
    start, end, value = (column[runs.value >= 0] for column in runs)
    rows = [(*looks[value], a, b) for a, b, value in zip(start, end, value.tolist(), strict=True)]
    return Bars(
        begin=start,
        length=end - start,
        row=np.zeros(len(rows)),
        colours=[colour for colour, *_ in rows],
        words=[f"{words}: from {clock} {a:,} up to {b:,}" for _, words, _, a, b in rows],
        names=[name for _, _, name, *_ in rows],
    )
