"""Places buffers one by one in a given order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplug.arena.native import packing
from memplug.arena.plan.intervals import instants
from memplug.sizes import UNLIMITED_BYTES


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
        self, order: np.ndarray, *, tightest: bool = False, limit_bytes: int = UNLIMITED_BYTES
    ) -> np.ndarray | None:
        """See `packing.place`."""
        lifetimes = (self.lower, self.upper)
        return packing.place(lifetimes, self.size, self.alignment, order, tightest=tightest, limit_bytes=limit_bytes)
