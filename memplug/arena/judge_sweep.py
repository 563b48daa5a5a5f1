"""The judge's sweep through time: finds two buffers that use the same bytes while the one may still be in use.

Nothing here is shared with what plans. A buffer holds its bytes, for the buffers of its own stream, until it is freed;
for those of another stream, until that stream has waited for its own, directly or through others; see `_Waits`. One
sweep looks at the buffers of one stream as those of one stream find them. It keeps for each stretch of the arena who
used it last, which is enough: a later user holds it longer. So each buffer is looked at a constant number of
times on average, and n buffers of s streams that share bytes take O(s n log n).
"""

from __future__ import annotations

from itertools import permutations

import numpy as np

NEVER = np.iinfo(np.int64).max
_LONG_AGO = np.iinfo(np.int64).min
_NOBODY = -1


def first_clash(table: np.ndarray, offsets: np.ndarray, orderings: np.ndarray) -> tuple[int, int] | None:
    """Two rows that use the same bytes, neither of which is certain to be freed before the other is asked for.

    Args:
        table: of dtype BUFFER.
        offsets: int64[n], of bytes; none below 0, their ends fit int64.
        orderings: of dtype ORDERING, by time; those at the same instant happen one after the other.

    Returns:
        The row that holds the bytes and the one that uses them too; None: there are no such two.
    """
    streams = np.unique(table["stream"]).tolist()
    rows = {stream: np.flatnonzero(table["stream"] == stream) for stream in streams}
    ends = offsets + table["size"]
    for mine in rows.values():
        clash = _sweep(table, offsets, ends, mine, mine, table["upper"][mine])
        if clash:
            return clash
    waits = _Waits(orderings, streams)
    for holder, asker in permutations(streams, 2):
        holding = rows[holder][_share(offsets, ends, rows[holder], rows[asker])]
        asking = rows[asker][_share(offsets, ends, rows[asker], rows[holder])]
        if len(holding):
            until = waits.until(holder, asker, table["upper"][holding])
            clash = _sweep(table, offsets, ends, holding, asking, until)
            if clash:
                return clash
    return None


class _Waits:
    """From when on a stream has waited for what another did up to some instant.

    Going back through the orderings, it is kept for each stream when each of `streams` will have waited for all that
    it has done by now; -inf for itself.
    """

    def __init__(self, orderings: np.ndarray, streams: list[int]) -> None:
        self._orderings = orderings
        self._column = {stream: column for column, stream in enumerate(streams)}
        reached = {}
        unreached = np.full(len(streams), NEVER)
        for stream, column in self._column.items():
            reached[stream] = unreached.copy()
            reached[stream][column] = _LONG_AGO
        self._reached = np.empty((len(orderings), len(streams)), np.int64)
        for row, (time, before, after) in reversed(list(enumerate(orderings.tolist()))):
            through = np.maximum(reached.get(after, unreached), time)
            reached[before] = self._reached[row] = np.minimum(reached.get(before, unreached), through)

    def until(self, holder: int, asker: int, freed: np.ndarray) -> np.ndarray:
        """When `asker` has waited for what `holder` did up to each instant of `freed`: int64[n], NEVER: does not."""
        own = np.flatnonzero(self._orderings["before"] == holder)
        following = np.searchsorted(self._orderings["time"][own], freed, "left")
        return np.append(self._reached[own, self._column[asker]], NEVER)[following]


class _Arena:
    """Who used each stretch of the arena last. Places are the running numbers of the offsets where stretches meet.

    A stretch is known by its first place. Which places are first ones is a set of bits, in words of about the square
    root of their number: Python's integers find the last one set before any place in two steps.
    """

    def __init__(self, places: int, until: list[int]) -> None:
        self._until = [*until, _LONG_AGO]  # of _NOBODY, too
        self._end = [0] * (places + 1)
        self._user = [_NOBODY] * (places + 1)
        self._end[0] = places
        self._shift = max(places.bit_length() // 2, 1)
        bits = 1 << self._shift
        self._within = bits - 1
        self._words = [0] * ((places >> self._shift) + 1)
        self._words[0] = 1
        self._filled = 1  # which words have a bit set
        self._bit = [1 << i for i in range(max(bits, len(self._words)) + 1)]

    def use(self, begin: int, end: int, user: int, now: int) -> int:
        """Makes [begin, end) a stretch of `user`, unless another holds some of it `now`: returns that one, or -1."""
        ends, users, until = self._end, self._user, self._until
        stretch = first = self._stretch(begin)
        while True:
            beyond, last_user = ends[stretch], users[stretch]
            if until[last_user] > now:
                return last_user
            if stretch > begin:
                self._forget(stretch)
            if beyond >= end:
                break
            stretch = beyond
        if beyond > end:
            self._remember(end)
            ends[end], users[end] = beyond, last_user
        if first < begin:
            ends[first] = begin
            self._remember(begin)
        ends[begin], users[begin] = end, user
        return _NOBODY

    def _stretch(self, place: int) -> int:
        """The one that the place is in."""
        number = place >> self._shift
        word = self._words[number] & ((self._bit[place & self._within] << 1) - 1)
        if not word:
            number = (self._filled & (self._bit[number] - 1)).bit_length() - 1
            word = self._words[number]
        return (number << self._shift) + word.bit_length() - 1

    def _remember(self, place: int) -> None:
        number = place >> self._shift
        self._words[number] |= self._bit[place & self._within]
        self._filled |= self._bit[number]

    def _forget(self, place: int) -> None:
        number = place >> self._shift
        self._words[number] ^= self._bit[place & self._within]
        if not self._words[number]:
            self._filled ^= self._bit[number]


def _sweep(
    table: np.ndarray, offsets: np.ndarray, ends: np.ndarray, holding: np.ndarray, asking: np.ndarray, until: np.ndarray
) -> tuple[int, int] | None:
    """As `first_clash`, of a buffer in rows `holding`, held until `until`, and one in rows `asking` that comes later.

    The rows are either the same or have none in common.
    """
    same = holding is asking
    rows = holding if same else np.concatenate([holding, asking])
    user = np.arange(len(rows))
    now = table["lower"][rows]
    order = np.argsort(now, kind="stable")  # of those that come at once, the ones that hold are first
    if not same:
        now[: len(holding)] = NEVER  # not held by then: they take what their own stream let them have
        user[len(holding) :] = _NOBODY
    places, begin_and_end = np.unique(np.concatenate([offsets[rows], ends[rows]]), return_inverse=True)
    begin, end = begin_and_end.reshape(2, -1)
    arena = _Arena(len(places) - 1, until.tolist())
    columns = (column[order].tolist() for column in (begin, end, user, now))
    for number, args in enumerate(zip(*columns, strict=True)):
        held_by = arena.use(*args)
        if held_by != _NOBODY:
            return int(rows[held_by]), int(rows[order[number]])
    return None


def _share(offsets: np.ndarray, ends: np.ndarray, mine: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Which rows of `mine` use a byte that one of `others` uses, at whatever time: bool[n]."""
    order = others[np.argsort(offsets[others])]
    furthest = np.concatenate([[-1], np.maximum.accumulate(ends[order])])
    return furthest[np.searchsorted(offsets[order], ends[mine], "left")] > offsets[mine]
