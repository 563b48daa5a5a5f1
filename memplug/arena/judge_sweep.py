"""The judge's sweep through time: finds two buffers that use the same bytes while one of them may still be in use.

It shares no code with the planners. Against requests of its own stream, a buffer holds its bytes until it is freed.
Against requests of another stream, it holds them until that stream has waited for the buffer's stream, directly or
through a chain of streams (see `_Waits`).

One sweep checks the requests of one stream against the buffers of one stream. For each stretch (range of bytes) the
sweep remembers only the last user, since a later user holds the stretch longer than an earlier one. So a sweep looks at
each buffer a constant number of times on average. For n buffers on s streams, all sweeps together take O(s n log n).
"""

from __future__ import annotations

from itertools import permutations

import numpy as np

NEVER = np.iinfo(np.int64).max
_LONG_AGO = np.iinfo(np.int64).min
_NOBODY = -1


def first_clash(table: np.ndarray, offsets: np.ndarray, orderings: np.ndarray) -> tuple[int, int] | None:
    """Return two buffers that share bytes, where the first may still be in use when the second is requested.

    Args:
        table: of dtype BUFFER.
        offsets: int64[n], bytes; not below 0, and offset + size fits int64.
        orderings: of dtype ORDERING, sorted by time; orderings at the same instant happen in their order in the table.

    Returns:
        The row of the buffer that holds the bytes, and the row of the later buffer; None if no two buffers clash.
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
    """The times at which streams have waited for the work of another stream.

    The constructor visits the orderings from the last to the first. For each ordering it stores when each stream has
    waited for all work of the ordering's stream `before` up to then. `before` itself need not wait: `_LONG_AGO`.
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
        """Return when stream `asker` has waited for stream `holder`'s work up to each time in `freed`.

        Returns:
            int64[n]; NEVER where `asker` does not wait.
        """
        own = np.flatnonzero(self._orderings["before"] == holder)
        following = np.searchsorted(self._orderings["time"][own], freed, "left")
        return np.append(self._reached[own, self._column[asker]], NEVER)[following]


class _Arena:
    """The last user of each stretch of the arena.

    In this file a place is the index of an offset at which a buffer begins or ends. A stretch reaches from one place to
    a later one, and is named by the first. A bitset marks the places at which stretches begin. It has about as many
    words as a word has bits, so two operations on Python's integers find the stretch around a place.
    """

    def __init__(self, places: int, until: list[int]) -> None:
        self._until = [*until, _LONG_AGO]  # the last entry is that of _NOBODY, which holds nothing
        self._end = [0] * (places + 1)
        self._user = [_NOBODY] * (places + 1)
        self._end[0] = places
        self._shift = max(places.bit_length() // 2, 1)
        bits = 1 << self._shift
        self._within = bits - 1
        self._words = [0] * ((places >> self._shift) + 1)
        self._words[0] = 1
        self._filled = 1  # bitset of the words that are not 0
        self._bit = [1 << i for i in range(max(bits, len(self._words)) + 1)]

    def use(self, begin: int, end: int, user: int, now: int) -> int:
        """Give [begin, end) to `user`, or return another user that still holds bytes of it; _NOBODY: none does."""
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
        """Return the first place of the stretch that contains `place`."""
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
    """Return a row of `holding` and a later row of `asking` that clash; see `first_clash`.

    `until` has the time up to which each row of `holding` holds its bytes. `holding` and `asking` are either the same
    rows or disjoint.
    """
    same = holding is asking
    rows = holding if same else np.concatenate([holding, asking])
    user = np.arange(len(rows))
    now = table["lower"][rows]
    order = np.argsort(now, kind="stable")  # at equal times, holders come first
    if not same:
        now[: len(holding)] = NEVER  # so `use` refuses no row of `holding`: no bytes are held so long
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
    """Return which rows of `mine` share a byte with a row of `others`, at whatever times. bool[n]."""
    order = others[np.argsort(offsets[others])]
    furthest = np.concatenate([[-1], np.maximum.accumulate(ends[order])])
    return furthest[np.searchsorted(offsets[order], ends[mine], "left")] > offsets[mine]
