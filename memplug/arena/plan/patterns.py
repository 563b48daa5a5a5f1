"""Finds stretches of a step that repeat, such as layers: by recorded phases and layers, or by the requests alone.

A stretch is a run of events of one phase and layer. Some runs do not repeat, such as a whole backward without layers,
or all events of a problem read from a CSV. Such a run may have periods: stretches of equal length that request and free
the same sizes in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_GRAM = 8
"""Number of consecutive events that must recur at a distance, so that it counts as a likely period."""

_PERIODS = 24
"""Number of likely periods to try."""

_SHORTEST = 16
"""Events in the shortest period: shorter repetitions (the optimizer's parameters, a norm in a layer) are no layers."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """The events [begin, end) of the step, and the buffers that live only in them.

    Attributes:
        begin, end: on the clock of the events.
        rows: rows of the buffers that are requested and freed inside, int64, in the order of mallocs.
        pattern: equal for stretches whose rows have the same sizes, alignments and relative lifetimes.
    """

    begin: int
    end: int
    rows: np.ndarray
    pattern: bytes


@dataclass(frozen=True, slots=True)
class _Events:
    """Mallocs and frees in order; their index is the clock.

    Attributes:
        token: int64, equal for events of one kind, size and alignment.
        place: int64, equal for events of one phase and layer.
        lower, upper: of each buffer, in this clock: int64[n].
    """

    token: np.ndarray
    place: np.ndarray
    lower: np.ndarray
    upper: np.ndarray


def stretches(table: np.ndarray, *, by_place: bool = True) -> list[Stretch]:
    """Return the stretches whose pattern repeats, sorted and disjoint; each has rows.

    Args:
        table: of dtype BUFFER.
        by_place: use phases and layers where the table has them. If false, use periods alone; a period may join
            stretches that belong together, such as a layer's recompute pass and its backward.
    """
    events = _events(table, by_place)
    borders = np.flatnonzero(np.diff(events.place, prepend=-1, append=-1))
    found = _with_rows(table, events, borders[:-1], borders[1:])
    repeated = _repeated(found)
    kept, others = [], []
    for stretch in found:
        # A run outside of layers, such as a backward that was not attributed to layers, may have layers in it.
        in_layer = by_place and table["lower_layer"][stretch.rows[0]] >= 0
        (kept if in_layer and stretch.pattern in repeated else others).append(stretch)
    for begin, end in _joined([(stretch.begin, stretch.end) for stretch in others]):
        inside = _with_rows(table, events, *_periodic(events, begin, end))
        kept += inside or [stretch for stretch in others if begin <= stretch.begin and stretch.end <= end]
    repeated = _repeated(kept)
    return sorted((each for each in kept if each.pattern in repeated), key=lambda stretch: stretch.begin)


def _events(table: np.ndarray, by_place: bool) -> _Events:
    count = len(table)
    times = np.concatenate([table["lower"], table["upper"]])
    # At the same instant, frees come before mallocs: lifetimes are half-open.
    order = np.lexsort((np.repeat([1, 0], count), times))
    kind = np.repeat([0, 1], count)[order]
    size = np.unique(np.stack([table["size"], table["alignment"]]), axis=1, return_inverse=True)[1].reshape(-1)
    phase = np.concatenate([table["lower_phase"], table["upper_phase"]])[order].astype(np.int64)
    layer = np.concatenate([table["lower_layer"], table["upper_layer"]])[order].astype(np.int64)
    position = np.empty(2 * count, np.int64)
    position[order] = np.arange(2 * count)
    return _Events(
        token=2 * np.tile(size, 2)[order] + kind,
        place=((phase + 1) * (layer.max(initial=-1) + 2) + layer + 1) * by_place,
        lower=position[:count],
        upper=position[count:],
    )


def _with_rows(table: np.ndarray, events: _Events, begins: np.ndarray, ends: np.ndarray) -> list[Stretch]:
    """Return the stretches [begins[i], ends[i]) that contain whole lifetimes; they must be disjoint and sorted."""
    if not len(begins):
        return []
    of_row = np.searchsorted(begins, events.lower, "right") - 1
    inside = np.flatnonzero((of_row >= 0) & (events.upper < ends[of_row]))
    inside = inside[np.lexsort((events.lower[inside], of_row[inside]))]
    bounds = np.searchsorted(of_row[inside], np.arange(len(begins) + 1))
    found = []
    for at in np.flatnonzero(np.diff(bounds)):
        rows, begin = inside[bounds[at] : bounds[at + 1]], int(begins[at])
        relative = (events.lower[rows] - events.lower[rows[0]], events.upper[rows] - events.lower[rows[0]])
        pattern = np.stack([*relative, table["size"][rows], table["alignment"][rows]]).tobytes()
        found.append(Stretch(begin, int(ends[at]), rows, pattern))
    return found


def _repeated(found: list[Stretch]) -> set[bytes]:
    seen, repeated = set(), set()
    for stretch in found:
        (repeated if stretch.pattern in seen else seen).add(stretch.pattern)
    return repeated


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge adjacent spans."""
    joined: list[tuple[int, int]] = []
    for begin, end in spans:
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined


def _periodic(events: _Events, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the begins and ends of stretches in [begin, end) that repeat back to back, sorted and disjoint."""
    token = events.token[begin:end]
    taken = np.zeros(len(token), bool)
    starts: list[int] = []
    ends: list[int] = []
    for period in _likely_periods(token):
        same = np.append(token[:-period] == token[period:], False) & ~taken[: len(token) - period + 1]
        edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]])))
        for first, last in zip(edges[::2], edges[1::2], strict=True):
            # Events [first, last) equal those one period later, so the repetition ends at last + period.
            if last - first >= period and not taken[first : last + period].any():
                cut = first + _quiet_cut(events, begin + int(first), period)
                count = (last + period - cut) // period
                if count >= 2:
                    starts += [begin + int(cut) + turn * period for turn in range(count)]
                    ends += [begin + int(cut) + (turn + 1) * period for turn in range(count)]
                    taken[first : last + period] = True
    order = np.argsort(starts)
    return np.array(starts, np.int64)[order], np.array(ends, np.int64)[order]


def _likely_periods(token: np.ndarray) -> list[int]:
    """Return the distances at which the same events recur most often, the shortest first."""
    if len(token) < 2 * _GRAM:
        return []
    # A running hash of _GRAM events; int64 wraps around.
    powers = np.power(np.int64(1_000_003), np.arange(_GRAM), dtype=np.int64)
    grams = sum(token[at : len(token) - _GRAM + 1 + at] * power for at, power in enumerate(powers))
    order = np.argsort(grams, kind="stable")
    follows = grams[order[1:]] == grams[order[:-1]]
    distances, counts = np.unique(np.diff(order)[follows], return_counts=True)
    # If the distance d is a period, at least d events recur at it.
    likely = (counts + _GRAM >= distances) & (distances >= _SHORTEST)
    distances, counts = distances[likely], counts[likely]
    most = np.argsort(-counts * distances, kind="stable")[:_PERIODS]
    return sorted(distances[most].tolist())


def _quiet_cut(events: _Events, begin: int, period: int) -> int:
    """Return the event within a period, counted from `begin`, at which the fewest short-lived buffers are in use."""
    short = (events.upper - events.lower < period) & (events.upper > begin) & (events.lower < begin + 2 * period)
    changes = np.zeros(2 * period + 1, np.int64)
    np.add.at(changes, np.clip(events.lower[short] + 1 - begin, 0, 2 * period), 1)
    np.add.at(changes, np.clip(events.upper[short] + 1 - begin, 0, 2 * period), -1)
    crossing = changes.cumsum()[period : 2 * period]
    return int(crossing.argmin())
