"""A trace as Chrome trace events: operators in time, and memory in use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from memplug.errors import MemplugError
from memplug.figures.groups import phase_words
from memplug.profile.trace import Trace
from memplug.show import trace_events
from memplug.show.timeline import layer_runs, runs
from memplug.show.words import heading

_NOTE = (
    "Each time is when the host dispatched an operator, in microseconds from the beginning of the recording. The trace "
    "has no end times: an operator is shown until the next one begins, at most to the measured end of its step. The "
    "counter is the largest memory in use during an operator."
)


def write_chrome(trace: Trace, path: str | Path) -> None:
    """Write the trace's steps, phases, layers, operators and memory as Chrome trace events.

    Raises:
        MemplugError: The trace has no operators, and so no times.
        OSError: The file cannot be written.
    """
    if not len(trace.operators):
        raise MemplugError(
            "a Chrome trace shows operators in time, and this trace has only memory requests",
            "Write a page or a snapshot of it, or record the step again with this version of memplug.",
        )
    about = {"title": heading(trace), "note": _NOTE, "fingerprint": trace.fingerprint.digest()}
    trace_events.write([process_of(trace)], Path(path), about)


def process_of(trace: Trace) -> trace_events.Process:
    """Return the trace as one process: tracks of steps, phases, layers and operators, and a counter of used memory."""
    begin_us, end_us = _times_us(trace)

    def slices(spans: Iterable[tuple[str, int, int, dict[str, Any]]]) -> Iterator[trace_events.Slice]:
        for text, first, last, about in spans:
            duration_us = round(max(end_us[last] - begin_us[first], 0), 3)
            yield trace_events.Slice(text, begin_us[first], duration_us, about)

    highest_bytes, rank = _highest_bytes(trace), trace.fingerprint.rank
    changes = np.flatnonzero(np.diff(highest_bytes, prepend=-1)).tolist()
    return trace_events.Process(
        number=rank + 1,
        name=f"memplug, rank {rank}",
        tracks={track: slices(spans) for track, spans in _tracks(trace).items()},
        counters={"memory in use": ((begin_us[each], {"bytes": int(highest_bytes[each])}) for each in changes)},
    )


def _tracks(trace: Trace) -> dict[str, list[tuple[str, int, int, dict[str, Any]]]]:
    """Return the tracks from top to bottom; for each span its name, first operator, last operator, and details."""
    operators, phases, layers = trace.operators, trace.phases, trace.layers
    return {
        "steps": [
            (f"step {step}", inside.start, inside.stop - 1, {"measured_s": seconds})
            for step, (_, _, seconds) in enumerate(trace.steps)
            if (inside := trace.step_operators(step)).stop > inside.start
        ],
        "phases": [
            (phase_words(phases[phase]), start, end - 1, {})
            for start, end, phase in np.transpose(runs(operators["phase"], len(operators))).tolist()
        ],
        "layers": [
            (layers[layer].name, start, end - 1, {"dynamic": layers[layer].dynamic})
            for start, end, layer in np.transpose(layer_runs(operators, len(operators))).tolist()
            if layer >= 0
        ],
        "operators": [
            (trace.names[name], operator, operator, {"operator": operator, "in_use_before_bytes": in_use})
            for operator, (name, in_use) in enumerate(operators[["name", "in_use_bytes"]].tolist())
        ],
    }


def _times_us(trace: Trace) -> tuple[list[float], list[float]]:
    """Return when each operator begins and ends, in microseconds.

    An operator ends when the next one begins or its step ends, whichever comes first.
    """
    begin = np.maximum.accumulate(trace.operators["time_ns"]) / 1000
    end = np.append(begin[1:], begin[-1])
    for step, (first, _, seconds) in enumerate(trace.steps):
        last = trace.step_operators(step).stop - 1
        if seconds and last >= first:
            over = begin[first] + seconds * 1e6
            end[last] = over if last + 1 == len(end) else min(end[last], over)
    return begin.tolist(), end.tolist()


def _highest_bytes(trace: Trace) -> np.ndarray:
    """Return the largest memory in use during each operator, including what was in use when it began.

    Returns:
        int64[operators], bytes.
    """
    count = len(trace.operators)
    during = np.maximum.accumulate(np.clip(trace.events["operator"], 0, None))
    levels = np.append(trace.base_bytes, trace.live_bytes)
    highest = levels[np.searchsorted(during, np.arange(count), "left")]
    np.maximum.at(highest, during, trace.live_bytes)
    return highest
