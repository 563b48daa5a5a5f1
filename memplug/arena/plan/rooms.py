"""Leaves room in a plan for dynamic requests: those whose sizes, or whether they come, other steps showed to vary.

STWeaver (section 5.2) serves dynamic requests from bytes that the planned ones happen to leave. A planner that places
all others as tightly as it can leaves few. So each HomoLayer group gets a room: a buffer that no request has, as large
as the group's bytes in use in any recorded step, for as long as the group lives. A room is placed like all buffers, and
the judge checks that no request's buffer meets it.

The clock counts the events of planned requests, which all steps have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from memplug.arena.plan.dynamic import GROUP, dynamic_requests, planned_events
from memplug.arena.plan.problem import BUFFER, Problem
from memplug.profile.trace import Trace
from memplug.sizes import BLOCK_BYTES, rounded_up

SPARE = 0.1
"""Bytes of a room beyond those that the recorded steps needed, as a share of them."""

MOST_OVER = 1.25
"""A plan has rooms if it then needs at most this many times the bytes that a recorded step had in use at once."""


@dataclass(frozen=True)
class _Curve:
    """The bytes that dynamic requests have in use in each step, from the first instant in which any has one in use.

    Attributes:
        name: phases and layers of the group, or of the first of several.
        begin: that instant.
        live: int64[steps, instants], up to the last such instant; the most bytes within each instant.
    """

    name: tuple[Any, ...]
    begin: int
    live: np.ndarray

    @property
    def end(self) -> int:
        """Return the instant after the last one."""
        return self.begin + self.live.shape[1]

    @cached_property
    def most(self) -> int:
        """Return the most bytes in use at once in any step."""
        return int(self.live.max())

    @property
    def area(self) -> int:
        """Return the bytes of a room times its instants."""
        return self.most * self.live.shape[1]

    def joined(self, other: _Curve) -> _Curve:
        """Return the curve of both groups together."""
        begin, end = min(self.begin, other.begin), max(self.end, other.end)
        live = np.zeros((len(self.live), end - begin), np.int64)
        for each in (self, other):
            live[:, each.begin - begin : each.end - begin] += each.live
        return _Curve(min(self, other, key=lambda each: each.begin).name, begin, live)


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
    planned = planned_events(step)
    # instant t is the time before planned event t, and after the one before it
    begins, ends = np.append(0, planned + 1), np.append(planned, len(step.events))
    found = []
    for stream, curves in _curves([step, *others], len(planned) + 1, margin_bytes).items():
        for curve in _joined(curves):
            lower, upper = int(begins[curve.begin]), int(ends[curve.end - 1])
            size = rounded_up(int(curve.most * (1 + SPARE)), BLOCK_BYTES)
            phases = (_index(step.phases, phase) for phase in curve.name[:2])
            layers = (_index(step.layers, layer) for layer in curve.name[2:4])
            place = (*phases, *layers)
            found.append((lower, max(upper, lower + 1), size, BLOCK_BYTES, stream, *place, False, True))
    return np.array(found, BUFFER)


def _curves(steps: Sequence[Trace], instants: int, margin_bytes: int) -> dict[int, list[_Curve]]:
    """Return the curves of all groups, by stream. Requests that outlive their step are in no group."""
    found: dict[tuple[Any, ...], np.ndarray] = {}
    for number, step in enumerate(steps):
        planned = planned_events(step)
        rows = dynamic_requests(step)
        rows = rows[rows["free_event"] >= 0]
        keys, group = np.unique(rows[list(GROUP)], return_inverse=True)
        sizes = rounded_up(rows["nbytes"], BLOCK_BYTES) + margin_bytes
        for at, key in enumerate(keys.tolist()):
            of_it = np.flatnonzero(group.reshape(-1) == at)
            name = _names(step, key)
            live = found.setdefault(name, np.zeros((len(steps), instants), np.int64))
            live[number] = _in_use(rows[of_it], sizes[of_it], planned, instants)
    curves: dict[int, list[_Curve]] = {}
    for name, live in found.items():
        used = np.flatnonzero(live.any(axis=0))
        if len(used):
            curve = _Curve(name, int(used[0]), live[:, used[0] : used[-1] + 1].copy())
            curves.setdefault(int(name[-1]), []).append(curve)
    return curves


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


def _index(values: Sequence[Any], value: Any) -> int:
    return values.index(value) if value in values else -1


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
        span = max(first.end, second.end) - min(first.begin, second.begin)
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
