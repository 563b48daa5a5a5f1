"""Writes Google's "Trace Event Format", which ui.perfetto.dev and chrome://tracing read; its times are microseconds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


class Slice(NamedTuple):
    """One bar on a track."""

    name: str
    begin_us: float
    duration_us: float
    about: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """Tracks under one heading.

    Attributes:
        number: From 1 on: Perfetto takes process 0 and thread 0 for the kernel's idle task.
        name: The heading.
        tracks: The bars of each track in order of time, by the track's name; tracks from top to bottom.
        counters: The samples of each counter in order of time, by the counter's name. A sample has a time in
            microseconds, and values by name.
    """

    number: int
    name: str
    tracks: Mapping[str, Iterable[Slice]]
    counters: Mapping[str, Iterable[tuple[float, dict[str, int]]]] = field(default_factory=dict)


def write(processes: Sequence[Process], path: Path, about: Mapping[str, Any] | None = None) -> None:
    """Write the events as one JSON object, in the order of their tracks.

    Args:
        processes: The processes with their tracks and counters.
        path: The file.
        about: Further information on the whole file ("otherData").

    Raises:
        OSError: The file cannot be written.
    """
    written = {
        "displayTimeUnit": "ms",
        **({"otherData": about} if about else {}),
        "traceEvents": [event for process in processes for event in events(process)],
    }
    path.write_text(json.dumps(written, separators=(",", ":")), encoding="utf-8")


def events(process: Process) -> Iterator[dict[str, Any]]:
    """Yield metadata ("M") and complete events ("X") by track, then counters ("C")."""
    own = {"pid": process.number}
    yield {"ph": "M", **own, "tid": 1, "name": "process_name", "args": {"name": process.name}}
    for tid, (track, slices) in enumerate(process.tracks.items(), start=1):
        yield {"ph": "M", **own, "tid": tid, "name": "thread_name", "args": {"name": track}}
        yield {"ph": "M", **own, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
        for name, begin_us, duration_us, about in slices:
            yield {"ph": "X", **own, "tid": tid, "name": name, "ts": begin_us, "dur": duration_us, "args": about}
    for name, values in process.counters.items():
        for ts, amounts in values:
            yield {"ph": "C", **own, "name": name, "ts": ts, "args": amounts}
