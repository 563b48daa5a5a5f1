"""Numbers to draw: memory in use along a trace's clock, split by what asked for it, and what ran meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplug.figures.clock import layer_runs, m4, runs
from memplug.figures.figure import Runs
from memplug.figures.groups import Grouping, by_layer, by_phase
from memplug.profile.trace import Trace, earlier_frees, still_live


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Timeline:
    """Memory in use at sampled places of the clock."""

    clock: str  # what it counts: "operator", or "request event" for a trace without operators
    length: int
    # float64[samples], strictly rising from 0 to `length`; events of one operator lie evenly between it and the next.
    at: np.ndarray
    event: np.ndarray  # int64[samples], the one that happened last; -1: none yet
    phases: Grouping
    layers: Grouping
    bytes_by_phase: np.ndarray  # int64[groups, samples], held by the groups of `phases` from then on
    bytes_by_layer: np.ndarray  # likewise; both add up to the memory in use
    phase_runs: Runs
    layer_runs: Runs
    step_starts: tuple[int, ...]  # on the clock
    peak: int  # sample with the largest memory in use, the first of them

    @property
    def in_use_bytes(self) -> np.ndarray:
        """int64[samples]."""
        return self.bytes_by_phase.sum(axis=0)


def timeline(trace: Trace, bins: int = 800) -> Timeline:
    """Samples a trace so that no maximum is lost.

    The clock is cut into `bins` equal parts, and of each the first, the smallest, the largest and the last memory in
    use is kept (M4, Jugel et al., VLDB 2014): a line through these samples, drawn over at most `bins` pixels, is the
    line through all of them. The peak is exact.
    """
    clock, length, places = _clock(trace)
    event = np.concatenate([[-1], m4(trace.live_bytes, places, length, bins), [len(places) - 1]])
    at = np.concatenate([[0.0], places[event[1:-1]], [length]])
    phases, layers = by_phase(trace.phases), by_layer(trace.layers)
    owner = owners(trace)
    levels = [
        _levels(trace, np.where(owner < 0, 0, groups.of[trace.events[column][owner]]), event, len(groups.groups))
        for groups, column in ((phases, "phase"), (layers, "layer"))
    ]
    rows, first = (trace.operators, 0) if clock == "operator" else (trace.events, 1)
    return Timeline(
        clock=clock,
        length=length,
        at=at,
        event=event,
        bytes_by_phase=levels[0],
        bytes_by_layer=levels[1],
        phases=phases,
        layers=layers,
        phase_runs=runs(rows["phase"]),
        layer_runs=layer_runs(rows),
        step_starts=tuple(int(step[first]) for step in trace.steps),
        peak=int(np.argmax(levels[0].sum(axis=0))),
    )


def owners(trace: Trace) -> np.ndarray:
    """The event that asked for what each event asks for or frees: int64[events]; -1: before the recording."""
    owner = np.arange(len(trace.events))
    freed = trace.requests[~still_live(trace.requests)]
    owner[freed["free_event"]] = freed["malloc_event"]
    owner[earlier_frees(trace.events)] = -1
    return owner


def _clock(trace: Trace) -> tuple[str, int, np.ndarray]:
    """Name and length of the clock, and where each event is on it: float64[events], strictly rising, above 0."""
    count = len(trace.events)
    if len(trace.operators):
        # An event of another thread may have seen the operator before; the order of the events is what counts.
        slot = np.maximum.accumulate(np.clip(trace.events["operator"], 0, None))
    else:
        slot = np.arange(count)
    first, last = np.searchsorted(slot, slot, "left"), np.searchsorted(slot, slot, "right")
    places = slot + (np.arange(count) - first + 1) / (last - first + 1)
    return ("operator", len(trace.operators), places) if len(trace.operators) else ("request event", count, places)


def _levels(trace: Trace, group: np.ndarray, event: np.ndarray, groups: int) -> np.ndarray:
    """int64[groups, samples]: what each group holds once the sampled events have happened; `group` is of each event."""
    sample = np.searchsorted(event, np.arange(len(group)), "left")
    changes = np.zeros((groups, len(event)), np.int64)
    np.add.at(changes, (group, sample), np.diff(trace.live_bytes, prepend=trace.base_bytes))
    changes[0, 0] += trace.base_bytes
    return np.cumsum(changes, axis=1)
