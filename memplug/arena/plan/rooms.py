"""Leaves room in a plan for dynamic requests: those whose sizes, or whether they come, other steps showed to vary.

STWeaver (section 5.2) serves dynamic requests from bytes that the planned ones happen to leave. A planner that places
all others as tightly as it can leaves few. So each HomoLayer group gets a room: a buffer that no request has, as large
as the group's bytes in use in any recorded step, for as long as the group may live. A room is placed like all buffers,
and the judge checks that no request's buffer meets it.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from memplug.arena.plan.dynamic import GROUP, dynamic_requests, spans_of, window
from memplug.arena.plan.problem import BUFFER, Problem
from memplug.profile.trace import Trace, without_gradients
from memplug.sizes import BLOCK_BYTES, rounded_up

SPARE = 0.1
"""Bytes of a room beyond those that the recorded steps needed, as a share of them."""

INSTANTS = 2048
"""A step is divided into at most so many parts, to compare groups."""

NEIGHBOURS = 16
"""A room may be joined with so many that begin before it, and as many that begin after it: more would take minutes."""

MOST_OVER = 1.25
"""A plan has rooms if it then needs at most this many times the bytes that a recorded step had in use at once."""


@dataclass(frozen=True)
class _Curve:
    """The bytes that dynamic requests have in use in each step, and when a room for them has to be there.

    Attributes:
        place: phases and layers of the group, or of the first of several, as in `BUFFER`.
        lower, upper: events of the step that is planned, from which and up to which the group may live.
        begin: the first instant of `live`. The instants divide each step by the planned requests made so far.
        live: int64[steps, instants]; the most bytes within each instant.
    """

    place: tuple[int, ...]
    lower: int
    upper: int
    begin: int
    live: np.ndarray

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
        return _Curve(first.place, first.lower, max(self.upper, other.upper), begin, live)


def with_rooms(problem: Problem, step: Trace, others: Sequence[Trace], margin_bytes: int = 0) -> Problem:
    """Return the problem with rooms for the step's dynamic requests, or as it is if rooms take too many bytes.

    Without rooms, dynamic requests have the bytes that the planned ones happen to leave, and torch's allocator.

    Args:
        problem: the step's other requests.
        step: as in `rooms`.
        others: as in `rooms`.
        margin_bytes: as in `rooms`.
    """
    larger = problem.with_more(rooms(step, others, margin_bytes))
    dynamic = dynamic_requests(step)
    dynamic = dynamic[dynamic["free_event"] >= 0]
    table = np.zeros(len(dynamic), BUFFER)
    table["lower"], table["upper"] = dynamic["malloc_event"], dynamic["free_event"]
    table["size"], table["alignment"] = rounded_up(dynamic["nbytes"], BLOCK_BYTES) + margin_bytes, BLOCK_BYTES
    in_use_bytes = problem.with_more(table).lower_bound
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
    parts: dict[tuple[Any, ...], list[tuple[int, int, np.ndarray]]] = {}  # step, first instant, bytes from there on
    for number, step in enumerate(steps):
        mallocs = step.requests["malloc_event"][~step.requests["dynamic"] & ~without_gradients(step)]
        rows = dynamic_requests(step)
        rows = rows[rows["free_event"] >= 0]
        keys, group = np.unique(rows[list(GROUP)], return_inverse=True)
        order = np.argsort(group.reshape(-1), kind="stable")
        bounds = np.searchsorted(group.reshape(-1)[order], np.arange(len(keys) + 1))
        for at, key in enumerate(map(list, keys.tolist())):
            of_it, name = rows[order[bounds[at] : bounds[at + 1]]], _names(step, key)
            if number == 0:
                places[name], parts[name] = (key, window(key, of_it, spans, len(step.events))), []
            if name in parts:
                parts[name].append((number, *_in_use(of_it, mallocs, margin_bytes)))
    curves: dict[int, list[_Curve]] = {}
    for name, ((malloc_phase, malloc_layer, free_phase, free_layer, stream), (lower, upper)) in places.items():
        begin = min(first_instant for _, first_instant, _ in parts[name])
        live = np.zeros((len(steps), max(at + len(part) for _, at, part in parts[name]) - begin), np.int64)
        for number, at, part in parts[name]:
            live[number, at - begin : at - begin + len(part)] = part
        place = (malloc_phase, free_phase, malloc_layer, free_layer)
        curves.setdefault(stream, []).append(_Curve(place, lower, upper, begin, live))
    return curves


def _in_use(rows: np.ndarray, mallocs: np.ndarray, margin_bytes: int) -> tuple[int, np.ndarray]:
    """Return the first instant in which a group has bytes in use, and the most bytes in each instant from there on.

    Args:
        rows: the group's requests, of dtype REQUEST.
        mallocs: events of the planned requests' mallocs, ascending; all steps have as many.
        margin_bytes: bytes that follow each request.
    """
    sizes = rounded_up(rows["nbytes"], BLOCK_BYTES) + margin_bytes
    events = np.concatenate([rows["malloc_event"], rows["free_event"]])
    order = np.argsort(events, kind="stable")
    live = np.concatenate([sizes, -sizes])[order].cumsum()
    parts = len(mallocs) + 1
    at = np.searchsorted(mallocs, events[order]) * min(INSTANTS, parts) // parts
    begin, instants = int(at[0]), np.arange(at[0], at[-1] + 1)
    last = np.flatnonzero(np.append(at[1:] != at[:-1], True))
    # the bytes as an instant begins: those after the last event before it
    before = np.searchsorted(at[last], instants) - 1
    curve = np.where(before >= 0, live[last][np.maximum(before, 0)], 0)
    np.maximum.at(curve, at - begin, live)
    return begin, curve


def _names(step: Trace, key: Sequence[int]) -> tuple[Any, ...]:
    """Return the phases and layers of a group, and its stream: the same in all steps."""
    malloc_phase, malloc_layer, free_phase, free_layer, stream = key
    layers = [step.layers[at] if at >= 0 else None for at in (malloc_layer, free_layer)]
    return (step.phases[malloc_phase], step.phases[free_phase], *layers, stream)


def _joined(curves: list[_Curve]) -> list[_Curve]:
    """Return the curves of rooms: pairs are joined, the most useful one first, while that makes their areas smaller.

    A room is compared with `NEIGHBOURS` rooms that begin next before it, and as many that begin next after it.
    """
    rooms = sorted(curves, key=lambda curve: curve.lower)
    alive = [(curve.lower, number) for number, curve in enumerate(rooms)]
    gains: list[tuple[int, int, int]] = []  # a heap of (gain below 0, room, room)

    def compare(one: int, other: int) -> None:
        first, second = rooms[one], rooms[other]
        span = max(first.upper, second.upper) - min(first.lower, second.lower)
        apart = first.area + second.area
        if apart > max(first.most, second.most) * span and (gain := apart - first.joined(second).area) > 0:
            heapq.heappush(gains, (-gain, one, other))

    for number in range(len(rooms)):
        for other in range(number + 1, min(number + 1 + NEIGHBOURS, len(rooms))):
            compare(number, other)
    gone: set[int] = set()
    while gains:
        _, one, other = heapq.heappop(gains)
        if one in gone or other in gone:
            continue
        gone |= {one, other}
        for each in (one, other):
            alive.remove((rooms[each].lower, each))
        rooms.append(rooms[one].joined(rooms[other]))
        number, begin = len(rooms) - 1, rooms[-1].lower
        at = bisect.bisect(alive, (begin, number))
        for _, each in alive[max(0, at - NEIGHBOURS) : at + NEIGHBOURS]:
            compare(each, number)
        alive.insert(at, (begin, number))
    return [rooms[number] for _, number in alive]
