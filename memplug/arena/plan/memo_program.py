"""MEMO's mixed integer program of a layout (section 4.2), solved with HiGHS."""

from __future__ import annotations

import time

import numpy as np

from memplug.arena.plan.small import Small

_PAIRS_AT_MOST = 20_000
"""Binary variables of the program; with more, HiGHS notices its time limit too late."""


def minimise(small: Small, offsets: np.ndarray, deadline_s: float) -> tuple[np.ndarray, bool]:
    """Return the lowest placement by MEMO's mixed integer program (section 4.2), and whether it is proven optimal.

    The program minimises the height M, where buffer i has offset A_i and size S_i. Each buffer needs A_i + S_i <= M.
    Each pair of buffers in use at the same time needs A_i + S_i <= A_j + z M_cap and A_j + S_j <= A_i + (1 - z) M_cap,
    with z in {0, 1}.

    Args:
        small: the problem.
        offsets: offsets of a valid placement, bytes; M_cap is its height. They are also the result if no lower
            placement is found, or if the program would have too many variables.
        deadline_s: when to end, on the clock of `time.monotonic`.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # imported late: it takes a second
    from scipy.sparse import coo_array

    count = len(small.size)
    cap = float((offsets // small.unit + small.size).max())
    meets = (small.lower[:, None] < small.upper) & (small.lower < small.upper[:, None])
    first, second = np.nonzero(np.triu(meets, 1))
    if len(first) > _PAIRS_AT_MOST:
        return offsets, False
    pairs = np.arange(len(first))
    size = small.size.astype(np.float64)
    multiple = small.alignment.astype(np.float64)  # the variables are offsets in multiples of the alignment
    z, height = count + pairs, count + len(pairs)
    upper_rows, lower_rows, top_rows = pairs, len(pairs) + pairs, 2 * len(pairs) + np.arange(count)
    entries = (
        (upper_rows, first, multiple[first]),
        (upper_rows, second, -multiple[second]),
        (upper_rows, z, np.full(len(pairs), -cap)),
        (lower_rows, second, multiple[second]),
        (lower_rows, first, -multiple[first]),
        (lower_rows, z, np.full(len(pairs), cap)),
        (top_rows, np.arange(count), multiple),
        (top_rows, np.full(count, height), np.full(count, -1.0)),
    )
    rows, columns, values = (np.concatenate(part) for part in zip(*entries, strict=True))
    shape = (2 * len(pairs) + count, height + 1)
    limit = np.concatenate([-size[first], cap - size[second], -size])
    bounds = Bounds(0, np.concatenate([np.floor((cap - size) / multiple), np.ones(len(pairs)), [cap]]))
    objective = np.zeros(height + 1)
    objective[height] = 1
    result = milp(
        objective,
        integrality=np.concatenate([np.ones(height), [0]]),
        bounds=bounds,
        constraints=LinearConstraint(coo_array((values, (rows, columns)), shape).tocsr(), -np.inf, limit),
        options={"time_limit": max(0.01, deadline_s - time.monotonic())},
    )
    if result.x is None:
        return offsets, False
    found = np.round(result.x[:count] * multiple).astype(np.int64) * small.unit
    if _height(small, found) > _height(small, offsets) or not _is_valid(small, found):
        return offsets, False
    return found, result.status == 0


def _height(small: Small, offsets: np.ndarray) -> int:
    return int((offsets + small.size * small.unit).max())


def _is_valid(small: Small, offsets: np.ndarray) -> bool:
    """Return whether no buffers overlap: with a large M_cap, rounding errors may make them overlap."""
    ends = offsets + small.size * small.unit
    meets = (small.lower[:, None] < small.upper) & (small.lower < small.upper[:, None])
    overlaps = (offsets[:, None] < ends) & (offsets < ends[:, None])
    np.fill_diagonal(overlaps, False)
    return not (meets & overlaps).any()
