"""Shows what the dynamic requests of recorded steps did, as the arena's server sees them.

All steps have the same planned requests, and their mallocs and frees divide each step into the same instants. So the
steps can be laid over each other, however many dynamic requests come between.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from memplug.arena.native import packing
from memplug.arena.plan.dynamic import GROUP, Key, dynamic_requests, spans_of, window
from memplug.arena.plan.problem import live_bytes
from memplug.profile.records import Layer, Phase
from memplug.profile.trace import Trace, without_gradients
from memplug.sizes import BLOCK_BYTES, rounded_up

INSTANTS = 4096
"""A step is divided into at most so many instants."""

_Place = tuple[Phase, Layer | None]


def dynamic_rows(step: Trace, stream: int) -> np.ndarray:
    """Return the dynamic requests of a stream that end within the step, of dtype REQUEST."""
    rows = dynamic_requests(step)
    return rows[(rows["free_event"] >= 0) & (rows["stream"] == stream)]


@dataclass(frozen=True, eq=False)
class Groups:
    """The HomoLayer groups of the step that is planned, and how its time is divided into instants.

    A place's requests that the planned step did not make are a group of their own, after those that it made.

    Attributes:
        keys: the groups that the planned step made.
        windows: of each group, as instants [first, end); int64[groups, 2].
        of_turn: for each place, (phase, layer) by value, the group of each dynamic request in turn; the last entry
            stands for all further ones.
        clock: events of the planned requests' mallocs and frees, ascending: they divide the step into instants.
        events: the number of the step's events.
    """

    keys: tuple[Key, ...]
    windows: np.ndarray
    of_turn: dict[_Place, list[int]]
    clock: np.ndarray
    events: int

    @classmethod
    def of(cls, step: Trace, stream: int) -> Groups:
        """Return the groups of a step's dynamic requests on one stream."""
        rows, spans, clock = dynamic_rows(step, stream), spans_of(step), _clock(step)
        keys, group = np.unique(rows[list(GROUP)], return_inverse=True)
        group, turns = group.reshape(-1), _turns(step, rows)
        keys = [tuple(key) for key in keys.tolist()]
        lifetimes = [window(list(key), rows[group == at], spans, len(step.events)) for at, key in enumerate(keys)]
        of_turn: dict[_Place, list[int]] = {}
        for place, turn, at in zip(_places(step, rows), turns.tolist(), group.tolist(), strict=True):
            known = of_turn.setdefault(place, [])
            known += [at] * (turn + 1 - len(known))  # requests that outlive the step, or of other streams, lie between
            known[turn] = at
        for known in of_turn.values():
            of_place = [lifetimes[at] for at in {*known}]
            known.append(len(lifetimes))
            lifetimes.append((min(lower for lower, _ in of_place), max(upper for _, upper in of_place)))
        windows = np.array(lifetimes, np.int64).reshape(-1, 2)
        windows = _instants(clock, windows - (0, 1), "right") + (0, 1)
        return cls(tuple(keys), windows, of_turn, clock, len(step.events))

    @property
    def instants(self) -> int:
        """Return the number of instants."""
        return min(INSTANTS, len(self.clock) + 1)

    def planned_bytes(self, table: np.ndarray) -> np.ndarray:
        """Return the most bytes that buffers, of dtype BUFFER, have in use in each instant. int64[instants]."""
        times, live = live_bytes(table)
        if not len(times):
            return np.zeros(self.instants, np.int64)
        # what is in use as an instant begins, and whatever changes within it
        at = np.concatenate([np.searchsorted(times, self.begins[:-1], "right") - 1, np.arange(len(times))])
        instant = np.searchsorted(self.begins[:-1], np.concatenate([self.begins[:-1], times]), "right") - 1
        most = np.zeros(self.instants, np.int64)
        np.maximum.at(most, np.maximum(instant, 0), np.where(at >= 0, live[np.maximum(at, 0)], 0))
        return most

    @cached_property
    def begins(self) -> np.ndarray:
        """Return the event at which each instant begins, and the step's end. int64[instants + 1]."""
        first = -(-np.arange(self.instants) * (len(self.clock) + 1) // self.instants)
        return np.concatenate([[0], self.clock[first[1:] - 1], [self.events]])


def _clock(step: Trace) -> np.ndarray:
    """Return the events of the planned requests, ascending. Steps of one program have as many."""
    rows = step.requests[~step.requests["dynamic"] & ~without_gradients(step)]
    return np.sort(np.concatenate([rows["malloc_event"], rows["free_event"][rows["free_event"] >= 0]]))


def _instants(clock: np.ndarray, events: np.ndarray, side: Literal["left", "right"] = "left") -> np.ndarray:
    """Return the instant of each event; an event of the clock ends an instant, or with "right" begins one."""
    parts = len(clock) + 1
    return np.searchsorted(clock, events, side) * min(INSTANTS, parts) // parts


def _places(step: Trace, rows: np.ndarray) -> list[_Place]:
    """Return the phase and layer of each request's malloc: the same in all steps."""
    pairs = rows[["malloc_phase", "malloc_layer"]].tolist()
    return [(step.phases[phase], step.layers[layer] if layer >= 0 else None) for phase, layer in pairs]


def _turns(step: Trace, rows: np.ndarray) -> np.ndarray:
    """Return for each of these rows how many dynamic requests came before it in its place. int64[n]."""
    dynamic = dynamic_requests(step)
    return _numbers_in_place(dynamic)[np.searchsorted(dynamic["number"], rows["number"])]


def _numbers_in_place(rows: np.ndarray) -> np.ndarray:
    """Return for each request how many came before it in the same phase and layer. int64[n]."""
    _, place = np.unique(rows[["malloc_phase", "malloc_layer"]], return_inverse=True)
    order = np.argsort(place, kind="stable")
    first = np.searchsorted(place[order], place[order])
    numbers = np.empty(len(rows), np.int64)
    numbers[order] = np.arange(len(rows)) - first
    return numbers


@dataclass(frozen=True, eq=False)
class ServedStep:
    """A recorded step as the arena sees its dynamic requests, in the order of time.

    Attributes:
        request: the request that each event concerns, as the arena's server sees them, int32[events].
        instant: of each event, int64[events].
        size: of each request, bytes, int64[n].
        group: of each request, as the arena expects it from its turn, int64[n].
    """

    request: np.ndarray
    instant: np.ndarray
    size: np.ndarray
    group: np.ndarray

    @classmethod
    def of(cls, step: Trace, groups: Groups, margin_bytes: int) -> ServedStep:
        """Return the requests of a step in those places that the planned step has too."""
        stream = groups.keys[0][GROUP.index("stream")]
        rows, clock = dynamic_rows(step, stream), _clock(step)
        of_turn = [groups.of_turn.get(place) for place in _places(step, rows)]
        turns = _turns(step, rows).tolist()
        group = [known[min(turn, len(known) - 1)] if known else -1 for known, turn in zip(of_turn, turns, strict=True)]
        known = np.array(group, np.int64) >= 0
        rows = rows[known]
        events = np.concatenate([rows["malloc_event"], rows["free_event"]])
        order = np.argsort(events, kind="stable")
        # another step may have a few planned requests more or fewer, such as a free after its end
        instant = np.minimum(_instants(clock, events), groups.instants - 1)
        return cls(
            np.tile(np.arange(len(rows)), 2)[order],
            instant[order],
            rounded_up(rows["nbytes"], BLOCK_BYTES) + margin_bytes,
            np.array(group, np.int64)[known],
        )

    def live_bytes(self, instants: int) -> np.ndarray:
        """Return the most bytes in use in each instant. int64[instants]."""
        is_malloc = np.zeros(len(self.request), bool)
        is_malloc[np.unique(self.request, return_index=True)[1]] = True
        changes = np.where(is_malloc, 1, -1) * self.size[self.request]
        return self._most(changes.cumsum(), instants)

    def height(self, hangs: np.ndarray, instants: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes that the room needs in each instant, and the end of the highest block of each group.

        Args:
            hangs: for each group, whether the room's top serves it.
            instants: the number of instants.
        """
        hanging = hangs[self.group]
        begin, height = packing.serve(self.request, self.size, hanging)
        ends = np.zeros(len(hangs), np.int64)
        np.maximum.at(ends, self.group[~hanging], (begin + self.size)[~hanging])
        return self._most(height, instants), ends

    def _most(self, after: np.ndarray, instants: int) -> np.ndarray:
        """Return the largest value in each instant, of a value that each event changes. int64[instants]."""
        most = np.zeros(instants, np.int64)
        if not len(after):
            return most
        np.maximum.at(most, self.instant, after)
        # the value as an instant begins
        last = np.flatnonzero(np.append(self.instant[1:] != self.instant[:-1], True))
        before = np.searchsorted(self.instant[last], np.arange(instants)) - 1
        return np.maximum(most, np.where(before >= 0, after[last][np.maximum(before, 0)], 0))
