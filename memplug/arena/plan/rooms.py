"""Leaves room in a plan for dynamic requests: those whose sizes, or whether they come, other steps showed to vary.

STWeaver (section 5.2) serves dynamic requests from bytes that the planned ones happen to leave. A planner that places
all others as tightly as it can leaves few. So each HomoLayer group gets a room: a buffer that no request has, as large
as the group's bytes in use in any recorded step, for as long as the group may live. A room is placed like all buffers,
and the judge checks that no request's buffer meets it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from memplug.arena.plan.dynamic import GROUP, dynamic_requests, spans_of, window
from memplug.arena.plan.problem import BUFFER, Problem
from memplug.profile.trace import Trace
from memplug.sizes import BLOCK_BYTES, rounded_up

SPARE = 0.1
"""Bytes of a room beyond those that the recorded steps needed, as a share of them."""

MOST_OVER = 1.25
"""A plan has rooms if it then needs at most this many times the bytes that a recorded step had in use at once."""


@dataclass(frozen=True)
class _Curve:
    """The bytes that dynamic requests have in use in each step, and when a room for them has to be there.

    Attributes:
        place: phases and layers of the group, or of the first of several, as in `BUFFER`.
        lower, upper: events of the step that is planned, from which and up to which the group may live.
        live: int64[steps, instants], from the instant `begin` on; the most bytes within each instant.
        begin: the first instant in which a request is in use; an instant lies between two events of planned requests.
    """

    place: tuple[int, ...]
    lower: int
    upper: int
    live: np.ndarray
    begin: int

    @cached_property
    def most(self) -> int:
        """Return the most bytes in use at once in any step."""
        return int(self.live.max())

    @property
    def area(self) -> int:
        """Return the bytes of a room times the events that it lasts."""
        return self.most * (self.upper - self.lower)

    def joined(self, other: _Curve) -> _Curve:
        """Return the curve of both groups together."""
        begin = min(self.begin, other.begin)
        end = max(each.begin + each.live.shape[1] for each in (self, other))
        live = np.zeros((len(self.live), end - begin), np.int64)
        for each in (self, other):
            live[:, each.begin - begin : each.begin - begin + each.live.shape[1]] += each.live
        first = min(self, other, key=lambda each: each.lower)
        return _Curve(first.place, first.lower, max(self.upper, other.upper), live, begin)


def with_rooms(problem: Problem, step: Trace, others: Sequence[Trace], margin_bytes: int = 0) -> Problem:
    """Return the problem with rooms for the step's dynamic requests, or as it is if rooms take too many bytes.

    Without rooms, dynamic requests have the bytes that the planned ones happen to leave, and torch's allocator.

    Args:
        problem: the step's other requests.
        step: as in `rooms`.
        others: as in `rooms`.
        margin_bytes: as in `rooms`.
    """
    larger = problem.with_rooms(rooms(step, others, margin_bytes))
    dynamic = dynamic_requests(step)
    dynamic = dynamic[dynamic["free_event"] >= 0]
    table = np.zeros(len(dynamic), BUFFER)
    table["lower"], table["upper"] = dynamic["malloc_event"], dynamic["free_event"]
    table["size"], table["alignment"] = rounded_up(dynamic["nbytes"], BLOCK_BYTES) + margin_bytes, BLOCK_BYTES
    in_use_bytes = problem.with_rooms(table).lower_bound
    return larger if larger.lower_bound <= MOST_OVER * in_use_bytes else problem


def rooms(step: Trace, others: Sequence[Trace], margin_bytes: int = 0) -> np.ndarray:
    """Return the rooms of a step's dynamic requests, of dtype BUFFER, on the clock of the step's events.

    Two groups share a room if that takes fewer bytes for a shorter time than two rooms.

    Args:
        step: one step, with its dynamic requests marked.
        others: other steps of the same program, marked too (`memplug.profile.varying.observed`).
        margin_bytes: bytes that follow each request in the arena.
    """
    found = []
    for stream, curves in _curves([step, *others], margin_bytes).items():
        for curve in _joined(curves):
            size = rounded_up(int(curve.most * (1 + SPARE)), BLOCK_BYTES)
            found.append((curve.lower, curve.upper, size, BLOCK_BYTES, stream, *curve.place, False, True))
    return np.array(found, BUFFER)


def _curves(steps: Sequence[Trace], margin_bytes: int) -> dict[int, list[_Curve]]:
    """Return the curve of each group of the first step, by stream, with the group's bytes in all steps.

    Requests that outlive their step are in no group.
    """
    first = steps[0]
    spans = spans_of(first)
    places: dict[tuple[Any, ...], tuple[list[int], tuple[int, int]]] = {}
    live: dict[tuple[Any, ...], np.ndarray] = {}
    for number, step in enumerate(steps):
        planned = _planned_events(step)
        rows = dynamic_requests(step)
        rows = rows[rows["free_event"] >= 0]
        keys, group = np.unique(rows[list(GROUP)], return_inverse=True)
        sizes = rounded_up(rows["nbytes"], BLOCK_BYTES) + margin_bytes
        for at, key in enumerate(map(list, keys.tolist())):
            of_it, name = np.flatnonzero(group.reshape(-1) == at), _names(step, key)
            if number == 0:
                places[name] = key, window(key, rows[of_it], spans, len(step.events))
                live[name] = np.zeros((len(steps), len(planned) + 1), np.int64)
            if name in live:
                live[name][number] = _in_use(rows[of_it], sizes[of_it], planned, live[name].shape[1])
    curves: dict[int, list[_Curve]] = {}
    for name, ((malloc_phase, malloc_layer, free_phase, free_layer, stream), (lower, upper)) in places.items():
        used = np.flatnonzero(live[name].any(axis=0))
        place = (malloc_phase, free_phase, malloc_layer, free_layer)
        curve = _Curve(place, lower, upper, live[name][:, used[0] : used[-1] + 1].copy(), int(used[0]))
        curves.setdefault(stream, []).append(curve)
    return curves


def _planned_events(step: Trace) -> np.ndarray:
    """Return the events of the requests that are not dynamic, ascending. int64[n]."""
    rows = step.requests[~step.requests["dynamic"]]
    return np.sort(np.concatenate([rows["malloc_event"], rows["free_event"][rows["free_event"] >= 0]]))


def _in_use(rows: np.ndarray, sizes: np.ndarray, planned: np.ndarray, instants: int) -> np.ndarray:
    """Return the most bytes that the requests have in use at once within each instant. int64[instants]."""
    events = np.concatenate([rows["malloc_event"], rows["free_event"]])
    order = np.argsort(events, kind="stable")
    live = np.concatenate([sizes, -sizes])[order].cumsum()
    at = np.searchsorted(planned, events[order])
    last = np.flatnonzero(np.append(at[1:] != at[:-1], True))
    # the bytes as an instant begins: those after the last event before it
    before = np.searchsorted(at[last], np.arange(instants)) - 1
    curve = np.where(before >= 0, live[last][np.maximum(before, 0)], 0)
    np.maximum.at(curve, at, live)
    return curve


def _names(step: Trace, key: Sequence[int]) -> tuple[Any, ...]:
    """Return the phases and layers of a group, and its stream: the same in all steps."""
    malloc_phase, malloc_layer, free_phase, free_layer, stream = key
    layers = [step.layers[at] if at >= 0 else None for at in (malloc_layer, free_layer)]
    return (step.phases[malloc_phase], step.phases[free_phase], *layers, stream)


def _joined(curves: list[_Curve]) -> list[_Curve]:
    """Return the curves of rooms: pairs are joined, the most useful one first, while that makes their areas smaller."""
    rooms = list(curves)
    gains: dict[tuple[int, int], int] = {}

    def compare(one: int, other: int) -> None:
        first, second = rooms[one], rooms[other]
        span = max(first.upper, second.upper) - min(first.lower, second.lower)
        apart = first.area + second.area
        if apart > max(first.most, second.most) * span and (gain := apart - first.joined(second).area) > 0:
            gains[one, other] = gain

    for other in range(len(rooms)):
        for one in range(other):
            compare(one, other)
    alive = set(range(len(rooms)))
    while gains:
        one, other = max(gains, key=gains.__getitem__)
        alive -= {one, other}
        gains = {pair: gain for pair, gain in gains.items() if alive.issuperset(pair)}
        rooms.append(rooms[one].joined(rooms[other]))
        for each in sorted(alive):
            compare(each, len(rooms) - 1)
        alive.add(len(rooms) - 1)
    return [rooms[each] for each in sorted(alive)]
