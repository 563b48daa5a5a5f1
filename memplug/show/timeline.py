"""The numbers of a timeline: memory in use along a trace's clock by phase and by layer, and when each of these ran."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplug.figures.clock import layer_runs, m4, runs
from memplug.figures.figure import Stretches
from memplug.figures.groups import Grouping, by_layer, by_phase
from memplug.profile.trace import Trace, earlier_frees, still_live


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Timeline:
    """Memory in use at sampled places of the clock."""

    clock: str  # unit of the clock: "operator", or "request event" for a trace without operators
    length: int
    # float64[samples], places on the clock, strictly rising from 0 to `length`. The events of an operator are spread
    # evenly between the operator's place and the next one's.
    at: np.ndarray
    event: np.ndarray  # int64[samples], row of the latest event; -1: none yet
    phases: Grouping
    layers: Grouping
    bytes_by_phase: np.ndarray  # int64[groups, samples], in use from each sample on, by group of `phases`
    bytes_by_layer: np.ndarray  # the same by group of `layers`; either array sums to the memory in use
    phase_runs: Stretches
    layer_runs: Stretches
    step_starts: tuple[int, ...]  # the place on the clock where each step starts
    peak: int  # index of the first sample with the largest memory in use

    @property
    def in_use_bytes(self) -> np.ndarray:
        """Return the memory in use at each sample.

        Returns:
            int64[samples], bytes.
        """
        return self.bytes_by_phase.sum(axis=0)


def timeline(trace: Trace, bins: int = 800) -> Timeline:
    """Sample a trace without losing a maximum.

    The samples are the first, smallest, largest and last memory in use in each of `bins` equal parts of the clock (M4,
    Jugel et al., VLDB 2014). Drawn over at most `bins` pixels, a line through these samples equals the line through all
    events. The peak is exact.
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
    """Return for each event the malloc event of the same request: for a free its malloc, for a malloc itself.

    Returns:
        int64[events], row of the malloc event; -1 if it was before the recording.
    """
    owner = np.arange(len(trace.events))
    freed = trace.requests[~still_live(trace.requests)]
    owner[freed["free_event"]] = freed["malloc_event"]
    owner[earlier_frees(trace.events)] = -1
    return owner


def _clock(trace: Trace) -> tuple[str, int, np.ndarray]:
    """Return the clock's name and length, and the place of each event on it.

    Returns:
        (name, length, float64[events] strictly rising and above 0).
    """
    count = len(trace.events)
    if len(trace.operators):
        # With several threads, an event may refer to an earlier operator than its predecessor: keep the events' order.
        slot = np.maximum.accumulate(np.clip(trace.events["operator"], 0, None))
    else:
        slot = np.arange(count)
    first, last = np.searchsorted(slot, slot, "left"), np.searchsorted(slot, slot, "right")
    places = slot + (np.arange(count) - first + 1) / (last - first + 1)
    return ("operator", len(trace.operators), places) if len(trace.operators) else ("request event", count, places)


def _levels(trace: Trace, group: np.ndarray, event: np.ndarray, groups: int) -> np.ndarray:
    """Return the bytes that each group holds after each sampled event.

    Args:
        trace: The trace.
        group: Group of each event, int64[events].
        event: Sampled events, int64[samples].
        groups: Number of groups.

    Returns:
        int64[groups, samples].
    """
    sample = np.searchsorted(event, np.arange(len(group)), "left")
    changes = np.zeros((groups, len(event)), np.int64)
    np.add.at(changes, (group, sample), np.diff(trace.live_bytes, prepend=trace.base_bytes))
    changes[0, 0] += trace.base_bytes
    return np.cumsum(changes, axis=1)
