"""A chart of when kernels, copies each way and the host are busy in a step on the virtual device; a panel per mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from memplug.figures.figure import Axis, Bars, ColourGroup, Column, Figure, Panel
from memplug.profile.operator_names import CONVOLUTION, MATMULS
from memplug.show import trace_events
from memplug.words import duration

TRACKS = ("host", "prefetch", "offload", "compute")
"""The tracks of a step, from bottom to top."""
COPIES = {"to host": "offload", "to device": "prefetch"}
KINDS = {"attention": "#c8520f", "matrix product": "#2166a5", "other kernels": "#9cc8e8"}
COLOURS = {**KINDS, "offload": "#3f8f5b", "prefetch": "#6a4c9c", "host": "#8c8f3f"}
BARS = 1500  # neighbouring spans of one kind become one bar if their gap is at most the step / BARS
LONG_S = 10.0  # steps at least this long are shown in seconds, others in milliseconds
QUEUE_S = 20e-6  # the same gap for the host, which counts as busy between kernels that it queues in quick succession


class BusySpan(Protocol):
    """An interval in which a stream was busy, and when the host queued its work; seconds since the step began."""

    stream: int
    begin_s: float
    end_s: float
    queued_s: float
    name: str


class Bar(NamedTuple):
    """Consecutive spans of one kind, drawn as one."""

    track: str
    kind: str
    begin_s: float
    end_s: float
    count: int


def gantt(title: str, steps: Mapping[str, tuple[float, Sequence[BusySpan]]]) -> Figure:
    """Return a figure with one panel for each step, all on one clock.

    Args:
        title: Title of the figure.
        steps: Duration in seconds and busy spans of each step, by the step's name.
    """
    longest_s = max(seconds for seconds, _ in steps.values())
    unit, per_s = ("seconds", 1) if longest_s >= LONG_S else ("milliseconds", 1000)
    panels = []
    for name, (seconds, spans) in steps.items():
        drawn = []
        bars = list(bars_of(spans, seconds))
        for kind, colour in COLOURS.items():
            rows = [bar for bar in bars if bar.kind == kind]
            if rows:
                # the legend has each kind once, from the first panel
                group = ColourGroup(kind, colour) if kind in KINDS and not panels else None
                drawn.append(_drawn(rows, colour, group, per_s))
        ticks = {row: f"{track}, {name}" if track == "compute" else track for row, track in enumerate(TRACKS)}
        y = Axis(title="", low=-0.6, high=len(TRACKS) - 0.4, ticks=ticks)
        panels.append(Panel(y=y, height=1.0, content=drawn, title=() if panels else ("",)))
    x = Axis(title=unit, low=0, high=longest_s * per_s, grid=True)
    told = ", ".join(f"{name} {duration(seconds)}" for name, (seconds, _) in steps.items())
    return Figure(title=title, subtitle=f"Predicted: {told}", columns=[Column(x=x, panels=panels)])


def _drawn(bars: Sequence[Bar], colour: str, group: ColourGroup | None, per_s: int) -> Bars:
    return Bars(
        begin=np.array([bar.begin_s * per_s for bar in bars]),
        length=np.array([(bar.end_s - bar.begin_s) * per_s for bar in bars]),
        row=np.array([TRACKS.index(bar.track) for bar in bars], np.int64),
        colours=[colour] * len(bars),
        words=[_words(bar) for bar in bars],
        thickness=0.8,
        group=group,
    )


def bars_of(spans: Iterable[BusySpan], step_s: float) -> Iterator[Bar]:
    """Yield the bars of all tracks; see `BARS` and `QUEUE_S` for the spans that become one bar."""
    resolution_s = step_s / BARS
    open_bars: dict[str, Bar] = {}
    for track, kind, begin_s, end_s in sorted(_placed(spans), key=lambda each: each[2]):
        bar = open_bars.get(track)
        near = QUEUE_S if track == "host" else resolution_s
        if bar is not None and bar.kind == kind and begin_s - bar.end_s <= near:
            open_bars[track] = bar._replace(end_s=max(end_s, bar.end_s), count=bar.count + 1)
            continue
        if bar is not None:
            yield bar
        open_bars[track] = Bar(track, kind, begin_s, end_s, 1)
    yield from open_bars.values()


def _placed(spans: Iterable[BusySpan]) -> Iterator[tuple[str, str, float, float]]:
    for span in spans:
        track = COPIES.get(span.name, "compute")
        yield track, _kind(span.name) if track == "compute" else track, span.begin_s, span.end_s
        yield "host", "host", span.queued_s, span.queued_s


def _kind(name: str) -> str:
    if name.startswith("attention"):
        return "attention"
    return "matrix product" if name in (*MATMULS, CONVOLUTION) else "other kernels"


def _words(bar: Bar) -> str:
    others = {"host": "the host queues", "offload": "copies to host", "prefetch": "copies to device"}
    what = others.get(bar.track, bar.kind)
    seconds = duration(bar.end_s - bar.begin_s)
    return f"{what}: {bar.count:,} in {seconds}, from {1e3 * bar.begin_s:.3f} ms"


def write_chrome(steps: Mapping[str, tuple[float, Sequence[BusySpan]]], path: Path) -> None:
    """Write all spans as Chrome trace events, a process for each step and a thread for each track.

    Raises:
        OSError: The file cannot be written.
    """
    processes = []
    for number, (name, (_, spans)) in enumerate(steps.items(), start=1):
        tracks: dict[str, list[trace_events.Slice]] = {track: [] for track in reversed(TRACKS[1:])}
        for span in spans:
            begin_us, duration_us = 1e6 * span.begin_s, 1e6 * (span.end_s - span.begin_s)
            about = {"stream": span.stream, "queued_us": round(1e6 * span.queued_s, 3)}
            made = trace_events.Slice(span.name, round(begin_us, 3), round(duration_us, 3), about)
            tracks[COPIES.get(span.name, "compute")].append(made)
        processes.append(trace_events.Process(number=number, name=name, tracks=tracks))
    trace_events.write(processes, path)
