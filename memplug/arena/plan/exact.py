"""A planner for 100 to 1,000 buffers that can be stopped at any time, and knows how far it is from the optimum.

A depth-first search with restarts (`native/packing/decide.cpp`) decides whether the buffers fit below a height. The
first height is the lower bound; a greedy placement gives an upper bound. Then the planner bisects the interval between
the two, and raises the lower bound above heights that are proven to be impossible. Sizes are divided by their common
divisor, and heights are multiples of it.

MEMO's mixed integer program (`memplug.arena.plan.memo_program`) minimises the height instead. It ends in time only for
up to some 50 buffers; tests compare the search with it.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Literal

import numpy as np

from memplug.arena.native import packing
from memplug.arena.plan import memo_program, search
from memplug.arena.plan.problem import Problem, Solution, solved
from memplug.arena.plan.small import Small

log = logging.getLogger("memplug")

Backend = Literal["native", "milp"]
LARGEST = 2_000
"""Largest number of buffers to search for: with more, the search hardly ends, and its tables grow quadratically."""
PROMISING = 500
"""Number of buffers above which `bilevel` places its blocks by `search`, and `auto` gives this planner more time."""


def solve(
    problem: Problem,
    *,
    deadline_s: float | None = None,
    enough_bytes: int | None = None,
    backend: Backend = "native",
) -> Solution:
    """Return the lowest placement, or the best found in time. Ignore streams; see `streams`.

    Args:
        problem: some 100 to 1,000 buffers. With more than `LARGEST`, the result is the greedy placement.
        deadline_s: when to end, on the clock of `time.monotonic`; by default after 10 s.
        enough_bytes: the height to end at, such as a capacity; by default the lower bound.
        backend: "native": the search; "milp": MEMO's program.

    Raises:
        NativeError: the search cannot be compiled here.
    """
    began = time.monotonic()
    deadline_s = began + 10 if deadline_s is None else deadline_s
    enough = max(enough_bytes or 0, problem.lower_bound)
    start = search.solve(problem, deadline_s=None, enough_bytes=enough)
    if start.height <= enough or len(problem) > LARGEST:
        return solved(problem, start.offsets, "exact", seconds=time.monotonic() - began)
    if backend == "milp":
        offsets, proven = memo_program.minimise(Small.of(problem), start.offsets, deadline_s)
    else:
        # The first height gets this share of the time: nearly all if it is `enough_bytes`, since a lower height gains
        # nothing then.
        share = 0.5 if enough_bytes is None else 0.95
        offsets, proven = _close_gap(problem, start.offsets, enough, deadline_s, share)
    height = int((offsets + problem.buffers["size"]).max(initial=0))
    return solved(
        problem,
        offsets,
        "exact",
        proven=proven,
        seconds=time.monotonic() - began,
        timed_out=not proven and height > enough,
    )


def _decide(small: Small, height: int, seconds: float) -> tuple[bool | None, np.ndarray]:
    """Decide whether buffers fit below a height: True with offsets, False if proven not to, None if out of time."""
    threads = min(os.cpu_count() or 1, 4)
    lifetimes = (small.lower, small.upper)
    return packing.decide(lifetimes, small.size, small.alignment, height, seconds=seconds, threads=threads)


def _close_gap(
    problem: Problem, offsets: np.ndarray, enough: int, deadline_s: float, share: float
) -> tuple[np.ndarray, bool]:
    """Return the lowest offsets found, and whether they are proven to be optimal."""
    small = Small.of(problem)
    # Heights in units. All up to `impossible` are proven impossible. `best` is the lowest that the search has reached,
    # and `hard` the highest below `best` at which it failed or timed out.
    impossible = -(-problem.lower_bound // small.unit) - 1
    target = max(enough // small.unit, impossible + 1)
    best = -(-int((offsets + problem.buffers["size"]).max()) // small.unit)
    hard = impossible
    height = target
    while best > target and time.monotonic() < deadline_s:
        seconds = max(0.01, (deadline_s - time.monotonic()) * share)
        fits, found = _decide(small, height, seconds)
        if fits:
            offsets = found * small.unit
            best = int((found + small.size).max())
        elif fits is None:
            hard = max(hard, height)
        else:
            impossible = hard = height
            target = max(target, height + 1)
        height, share = (best + hard) // 2, 0.25
        if best - hard <= 1:
            # No height is left between the two: spend the remaining time on the lowest that is not proven impossible.
            height, share, hard = max(target, impossible + 1), 1.0, impossible
    return offsets, best == impossible + 1
