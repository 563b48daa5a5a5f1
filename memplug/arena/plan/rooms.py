"""Leaves room in a plan for dynamic requests: those whose sizes, or whether they come, other steps showed to vary.

STWeaver (section 5.2) serves dynamic requests from bytes that the planned ones happen to leave. A planner that places
all others as tightly as it can leaves few. So the bottom of the arena is theirs, as high at each time as the recorded
steps needed, and all planned requests lie above. Served there from two ends, as the arena serves them, what one layer
does not need another one gets: the room holds the sum of what all layers have in use, not the sum of their largest.

The room's height over time is a staircase. Its steps are rectangles of bytes and time, one above another: buffers that
no request has. Planners place them before all others (`first_fit.Placer`), and the judge checks that no request's
buffer meets one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from memplug.arena.native import packing
from memplug.arena.plan.dynamic import GROUP, dynamic_requests, numbers_in_place, spans_of, window
from memplug.arena.plan.problem import BUFFER, Problem
from memplug.profile.trace import Trace, without_gradients
from memplug.sizes import BLOCK_BYTES, rounded_up

INSTANTS = 4096
"""A step is divided into at most so many parts, in each of which the room has one height."""

LEVELS = 256
"""The room has at most so many heights."""

DEVIATIONS = 2.0
LEAST_SPARE, MOST_SPARE = 0.01, 0.25
"""The room is higher than the recorded steps needed: by `DEVIATIONS` standard deviations of what they had in use, as
far as that is from 1 to 25 % of it."""

THRESHOLDS = 6
"""So many lifetimes are tried as the border between requests at the bottom of the room and those at its top."""

MOST_OVER = 1.25
"""A plan has a room if it then needs at most this many times the bytes that a recorded step had in use at once."""

Key = tuple[int, ...]
"""A HomoLayer group: its values of `GROUP`."""


def with_rooms(
    problem: Problem, step: Trace, others: Sequence[Trace], margin_bytes: int = 0
) -> tuple[Problem, frozenset[Key]]:
    """Return the problem with a room for the step's dynamic requests, and the groups that the room's top serves.

    Without a room, dynamic requests have the bytes that the planned ones happen to leave, and torch's allocator. The
    problem has no room if one takes too many bytes.

    Args:
        problem: the step's other requests.
        step: one step, with its dynamic requests marked.
        others: other steps of the same program, marked too (`memplug.profile.varying.observed`).
        margin_bytes: bytes that follow each request in the arena.
    """
    groups = _Groups.of(step, problem.main_stream)
    if not groups.keys:
        return problem, frozenset()
    steps = [_Served.of(each, groups, margin_bytes) for each in (step, *others)]
    spare = 1 + _spare(steps)
    found: list[tuple[int, Problem, frozenset[Key]]] = []
    for hangs in _sides(groups):
        larger = problem.with_more(_staircase(np.ceil(_height(steps, groups, hangs) * spare), groups))
        hanging = frozenset(key for key, hanging in zip(groups.keys, hangs.tolist(), strict=False) if hanging)
        found.append((larger.lower_bound, larger, hanging))
    bound, larger, hanging = min(found, key=lambda each: each[0])
    in_use = problem.with_more(_as_buffers(step, problem.main_stream, margin_bytes)).lower_bound
    return (larger, hanging) if bound <= MOST_OVER * in_use else (problem, frozenset())


def _as_buffers(step: Trace, stream: int, margin_bytes: int) -> np.ndarray:
    """Return the dynamic requests with the bytes that they had in this step, of dtype BUFFER."""
    rows = _rows(step, stream)
    table = np.zeros(len(rows), BUFFER)
    table["lower"], table["upper"], table["stream"] = rows["malloc_event"], rows["free_event"], stream
    table["size"], table["alignment"] = rounded_up(rows["nbytes"], BLOCK_BYTES) + margin_bytes, BLOCK_BYTES
    return table


def _rows(step: Trace, stream: int) -> np.ndarray:
    """Return the dynamic requests of a stream that end within the step, of dtype REQUEST."""
    rows = dynamic_requests(step)
    return rows[(rows["free_event"] >= 0) & (rows["stream"] == stream)]


@dataclass(frozen=True, eq=False)
class _Groups:
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
    of_turn: dict[tuple, list[int]]
    clock: np.ndarray
    events: int

    @classmethod
    def of(cls, step: Trace, stream: int) -> _Groups:
        """Return the groups of a step's dynamic requests on one stream."""
        rows, spans, clock = _rows(step, stream), spans_of(step), _clock(step)
        keys, group = np.unique(rows[list(GROUP)], return_inverse=True)
        group, turns = group.reshape(-1), _turns(step, rows)
        keys = [tuple(key) for key in keys.tolist()]
        lifetimes = [window(list(key), rows[group == at], spans, len(step.events)) for at, key in enumerate(keys)]
        of_turn: dict[tuple, list[int]] = {}
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


def _places(step: Trace, rows: np.ndarray) -> list[tuple]:
    """Return the phase and layer of each request's malloc: the same in all steps."""
    pairs = rows[["malloc_phase", "malloc_layer"]].tolist()
    return [(step.phases[phase], step.layers[layer] if layer >= 0 else None) for phase, layer in pairs]


def _turns(step: Trace, rows: np.ndarray) -> np.ndarray:
    """Return for each of these rows how many dynamic requests came before it in its place. int64[n]."""
    dynamic = dynamic_requests(step)
    return numbers_in_place(dynamic)[np.searchsorted(dynamic["number"], rows["number"])]


@dataclass(frozen=True, eq=False)
class _Served:
    """What the dynamic requests of a recorded step did, in the order of time.

    Attributes:
        request: the request that each event concerns, as the arena's server sees them, int32[events].
        instant: of each event, int64[events].
        size: of each request, bytes, int64[n].
        group: of each request, as the arena expects it from its turn, int64[n].
        layer: of each request's malloc, int64[n].
        lived: first and last instant of each request, int64[n, 2].
    """

    request: np.ndarray
    instant: np.ndarray
    size: np.ndarray
    group: np.ndarray
    layer: np.ndarray
    lived: np.ndarray

    @classmethod
    def of(cls, step: Trace, groups: _Groups, margin_bytes: int) -> _Served:
        """Return the requests of a step in those places that the planned step has too."""
        stream = groups.keys[0][GROUP.index("stream")]
        rows, clock = _rows(step, stream), _clock(step)
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
            rows["malloc_layer"],
            instant.reshape(2, -1).T,
        )

    def height(self, hangs: np.ndarray, instants: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes that the room needs in each instant, and the end of the highest block of each group.

        Args:
            hangs: for each group, whether the room's top serves it.
            instants: the number of instants.
        """
        hanging = hangs[self.group]
        begin, height = packing.serve(self.request, self.size, hanging)
        most = np.zeros(instants, np.int64)
        np.maximum.at(most, self.instant, height)
        # a room that is in use as an instant begins
        last = np.flatnonzero(np.append(self.instant[1:] != self.instant[:-1], True))
        before = np.searchsorted(self.instant[last], np.arange(instants)) - 1
        carried = np.where(before >= 0, height[last][np.maximum(before, 0)], 0) if len(last) else 0
        ends = np.zeros(len(hangs), np.int64)
        np.maximum.at(ends, self.group[~hanging], (begin + self.size)[~hanging])
        return np.maximum(most, carried), ends


def _sides(groups: _Groups) -> list[np.ndarray]:
    """Return which groups the room's top may serve, bool[groups] each: none, or those that live short enough."""
    lived = groups.windows[:, 1] - groups.windows[:, 0]
    borders = np.unique(np.quantile(lived, np.linspace(0, 1, THRESHOLDS + 1), method="nearest"))
    return [np.zeros(len(lived), bool), *(lived <= border for border in borders)]


def _height(steps: Sequence[_Served], groups: _Groups, hangs: np.ndarray) -> np.ndarray:
    """Return the room's height in each instant, bytes: each group finds all that it needs throughout its window."""
    served = [each.height(hangs, groups.instants) for each in steps]
    height = np.max([most for most, _ in served], axis=0)
    ends = np.max([ends for _, ends in served], axis=0)
    windows = groups.windows.tolist()
    for (begin, end), least in zip(windows, ends.tolist(), strict=True):
        np.maximum(height[begin:end], least, out=height[begin:end])
    # What hangs begins at one height throughout its window. Windows may meet, so that one raises another.
    hanging = [windows[at] for at in np.flatnonzero(hangs)]
    changed = True
    while changed:
        changed = False
        for begin, end in hanging:
            most = height[begin:end].max()
            changed = changed or bool((height[begin:end] != most).any())
            height[begin:end] = most
    return height


def _spare(steps: Sequence[_Served]) -> float:
    """Return the share by which the room is higher than the recorded steps needed, from how much these differ.

    Layers route independently of each other, so their variances add up.
    """
    in_use = [np.bincount(each.instant, np.where(_is_malloc(each), 1, -1) * each.size[each.request]) for each in steps]
    live = [changes.cumsum() for changes in in_use if len(changes)]
    if len(live) < 2:
        return LEAST_SPARE
    fullest = int(max(live, key=lambda each: each.max()).argmax())
    layers = 1 + max(int(each.layer.max(initial=0)) for each in steps)
    bytes_of = []
    for each in steps:
        is_live = (each.lived[:, 0] <= fullest) & (fullest < np.maximum(each.lived[:, 1], each.lived[:, 0] + 1))
        bytes_of.append(np.bincount(each.layer[is_live] + 1, each.size[is_live], layers + 1))
    deviation = float(np.sqrt(np.var(bytes_of, axis=0, ddof=1).sum()))
    total = float(np.sum(bytes_of, axis=1).max())
    return min(MOST_SPARE, max(LEAST_SPARE, DEVIATIONS * deviation / total)) if total else LEAST_SPARE


def _is_malloc(step: _Served) -> np.ndarray:
    """Return which events are mallocs, bool[events]: the first one of each request."""
    first = np.zeros(len(step.request), bool)
    first[np.unique(step.request, return_index=True)[1]] = True
    return first


def _staircase(height: np.ndarray, groups: _Groups) -> np.ndarray:
    """Return rectangles below the height, of dtype BUFFER: each one comes after the one on which it lies."""
    unit = rounded_up(int(height.max(initial=0)) // LEVELS + 1, BLOCK_BYTES)
    levels = [*rounded_up(height.astype(np.int64), unit).tolist(), 0]
    found: list[tuple[int, int, int]] = []
    open_: list[tuple[int, int]] = []  # (first instant, level): rectangles that have not ended, each above the last
    for at, level in enumerate(levels):
        begin = at
        while open_ and open_[-1][1] > level:
            begin, top = open_.pop()
            below = max(open_[-1][1] if open_ else 0, level)
            found.append((begin, at, top - below))
        if level > (open_[-1][1] if open_ else 0):
            open_.append((begin, level))
    table = np.zeros(len(found), BUFFER)
    begin, end, size = np.array(found[::-1], np.int64).reshape(-1, 3).T
    table["lower"], table["upper"], table["size"] = groups.begins[begin], groups.begins[end], size
    table["alignment"], table["stream"], table["room"] = BLOCK_BYTES, groups.keys[0][GROUP.index("stream")], True
    for column in ("lower_phase", "upper_phase", "lower_layer", "upper_layer"):
        table[column] = -1
    return table[table["upper"] > table["lower"]]
