"""Places buffers one by one in a given order: in C++ where there is a compiler, else in Python, to the same offsets."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import numpy as np

from memplug.errors import NativeError
from memplug.native import packing
from memplug.plan.layout.intervals import instants

log = logging.getLogger("memplug")


@dataclass(frozen=True, slots=True)
class Placer:
    """Greedy placement of one set of buffers, in as many orders as one likes.

    Attributes:
        lower, upper: int32[n], see `intervals.instants`.
        size, alignment: int64[n], bytes.
    """

    lower: np.ndarray
    upper: np.ndarray
    size: np.ndarray
    alignment: np.ndarray

    @staticmethod
    def of(table: np.ndarray) -> Placer:
        """For a table of dtype BUFFER."""
        lower, upper = instants(table)
        return Placer(lower, upper, table["size"].copy(), table["alignment"].copy())

    def place(
        self, order: np.ndarray, *, tightest: bool = False, limit_bytes: int = packing.UNLIMITED_BYTES
    ) -> np.ndarray | None:
        """See `packing.place`."""
        if is_native():
            lifetimes = (self.lower, self.upper)
            return packing.place(
                lifetimes, self.size, self.alignment, order, tightest=tightest, limit_bytes=limit_bytes
            )
        return self._place_in_python(order, tightest, limit_bytes)

    def _place_in_python(self, order: np.ndarray, tightest: bool, limit_bytes: int) -> np.ndarray | None:
        offsets = np.zeros(len(self.size), np.int64)
        # Of what is placed, by offset; the arrays are full length, and `count` of them in use.
        starts, ends = np.zeros(len(order), np.int64), np.zeros(len(order), np.int64)
        lowers, uppers = np.zeros(len(order), np.int32), np.zeros(len(order), np.int32)
        for count, row in enumerate(order.tolist()):
            size, alignment = int(self.size[row]), int(self.alignment[row])
            meets = (lowers[:count] < self.upper[row]) & (self.lower[row] < uppers[:count])
            taken = starts[:count][meets]
            below = np.concatenate([[0], np.maximum.accumulate(ends[:count][meets])])
            free = -(-below // alignment) * alignment
            gaps = taken - free[:-1]
            fits = np.flatnonzero(gaps >= size)
            chosen = (fits[gaps[fits].argmin()] if tightest else fits[0]) if fits.size else len(taken)
            offset = offsets[row] = int(free[chosen])
            if offset + size >= limit_bytes:
                return None
            at = int(np.searchsorted(starts[:count], offset, "right"))
            new = (offset, offset + size, self.lower[row], self.upper[row])
            for array, value in zip((starts, ends, lowers, uppers), new, strict=True):
                array[at + 1 : count + 1] = array[at:count]
                array[at] = value
        return offsets


@functools.cache
def is_native() -> bool:
    """Whether the C++ placement can be used; where it cannot, says so once."""
    try:
        packing.load()
    except NativeError as error:
        log.warning("memplug: %s. Planning goes on in Python, slower and without the search for a proof", error.problem)
        return False
    return True
