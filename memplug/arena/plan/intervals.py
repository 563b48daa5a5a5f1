"""Renumbers the times of lifetimes without gaps, as instants or as sections, and sums the bytes in use in each.

Planners need only the order of times, so they renumber lifetimes before any search.
"""

from __future__ import annotations

import numpy as np


def instants(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return lower and upper of each buffer, renumbered from 0 without gaps. int32[n] each.

    Args:
        table: of dtype BUFFER.
    """
    times = np.unique(np.concatenate([table["lower"], table["upper"]]))
    lower, upper = np.searchsorted(times, table["lower"]), np.searchsorted(times, table["upper"])
    return lower.astype(np.int32), upper.astype(np.int32)


def sections(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first section of each buffer, and the section at which it ends. int32[n] each.

    A section is the last instant between a malloc and a free that directly follows it. The buffers in use then are no
    subset of those in use just before or just after. Two buffers share a section if and only if their lifetimes
    overlap. There are far fewer sections than instants.

    Args:
        table: of dtype BUFFER.
    """
    lower, upper = instants(table)
    count = int(upper.max(initial=0))
    begins, ends = np.zeros(count + 1, bool), np.zeros(count + 1, bool)
    begins[lower] = ends[upper] = True
    # The first free after a malloc ends a section.
    last_malloc = np.maximum.accumulate(np.where(begins, np.arange(count + 1), -1))
    closing = np.flatnonzero(ends)
    of_closing = last_malloc[closing - 1]
    first = np.concatenate([[True], of_closing[1:] != of_closing[:-1]]) if len(closing) else np.zeros(0, bool)
    at = closing[first] - 1
    return np.searchsorted(at, lower).astype(np.int32), np.searchsorted(at, upper).astype(np.int32)


def load_bytes(lower: np.ndarray, upper: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Return the bytes in use in each section or instant. int64.

    Args:
        lower: of each buffer, int32[n], numbered from 0.
        upper: of each buffer, int32[n].
        size: int64[n], bytes.
    """
    changes = np.zeros(int(upper.max(initial=0)) + 1, np.int64)
    np.add.at(changes, lower, size)
    np.add.at(changes, upper, -size)
    return changes.cumsum()[:-1]


def largest_within(values: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """Return the maximum of values[lower:upper] for each buffer, where lower < upper."""
    # A sparse table has the maxima of all stretches whose length is a power of two; two of them cover any stretch.
    found = np.empty(len(lower), values.dtype)
    power = np.frexp((upper - lower).astype(np.float64))[1] - 1
    level = values
    for exponent in range(int(power.max(initial=-1)) + 1):
        of_level = np.flatnonzero(power == exponent)
        ends = upper[of_level] - (1 << exponent)
        found[of_level] = np.maximum(level[lower[of_level]], level[ends])
        half = 1 << exponent
        level = np.maximum(level[:-half], level[half:]) if len(level) > half else level
    return found
