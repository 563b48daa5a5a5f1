"""Greedy placement of buffers in a given order; rooms for dynamic requests come first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplug.arena.native import packing
from memplug.arena.plan.intervals import instants
from memplug.sizes import UNLIMITED_BYTES


@dataclass(frozen=True, slots=True)
class Placer:
    """A set of buffers to be placed greedily, in any number of orders.

    Attributes:
        lower, upper: int32[n], see `intervals.instants`.
        size, alignment: int64[n], bytes.
        room: bool[n]; these are placed before all others and in the order of the table, so that they lie at the bottom.
    """

    lower: np.ndarray
    upper: np.ndarray
    size: np.ndarray
    alignment: np.ndarray
    room: np.ndarray

    @staticmethod
    def of(table: np.ndarray) -> Placer:
        """Return the placer of a table of dtype BUFFER."""
        lower, upper = instants(table)
        return Placer(lower, upper, table["size"].copy(), table["alignment"].copy(), table["room"].copy())

    def place(
        self, order: np.ndarray, *, tightest: bool = False, limit_bytes: int = UNLIMITED_BYTES
    ) -> np.ndarray | None:
        """Place the buffers in that order, but for rooms; see `packing.place`."""
        if self.room.any():
            order = np.concatenate([np.flatnonzero(self.room), order[~self.room[order]]])
        lifetimes = (self.lower, self.upper)
        return packing.place(lifetimes, self.size, self.alignment, order, tightest=tightest, limit_bytes=limit_bytes)
