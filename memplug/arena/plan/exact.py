"""A planner for small sets, some 100 to 1,000 buffers: anytime, and it knows how far from the optimum it is.

From below: a depth-first search with restarts (`native/packing/decide.cpp`) decides whether the buffers fit
below a height, beginning at the lower bound. The mixed integer program of MEMO (`memplug.arena.plan.memo_program`)
minimises instead; it ends in time for some 50 buffers, and is the reference that the search is checked against.

A greedy placement is the bound from above. What lies between is bisected; heights that were shown to be impossible
raise the bound from below. Sizes are divided by their common divisor, and heights are multiples of it.
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
"""Buffers; beyond, the search hardly ever ends, and its tables grow with the square."""
PROMISING = 500
"""Buffers; up to here it is the planner to begin with."""


def solve(
    problem: Problem,
    *,
    deadline_s: float | None = None,
    enough_bytes: int | None = None,
    backend: Backend = "native",
) -> Solution:
    """The lowest placement, or the best that was found in time; streams are ignored: see `streams`.

    Args:
        problem: some 100 to 1,000 buffers. Beyond `LARGEST` the search is left out, and the greedy placement returned.
        deadline_s: when to end, on the clock of `time.monotonic`; by default after 10 s.
        enough_bytes: a height to end at, such as a capacity; by default the lower bound.
        backend: "native": the search; "milp": MEMO's program.

    Raises:
        NativeError: The search cannot be compiled here.
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
        # Who names a height wants that one, not the lowest; without one, the lower bound is most often possible.
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
    """Whether buffers fit below a height: True with offsets, False: proven that not, None: out of time."""
    threads = min(os.cpu_count() or 1, 4)
    lifetimes = (small.lower, small.upper)
    return packing.decide(lifetimes, small.size, small.alignment, height, seconds=seconds, threads=threads)


def _close_gap(
    problem: Problem, offsets: np.ndarray, enough: int, deadline_s: float, share: float
) -> tuple[np.ndarray, bool]:
    """Better offsets if there are any, and whether they are proven to be the best."""
    small = Small.of(problem)
    # In units: below `impossible` + 1 nothing fits; at `best` something does; up to `hard` the time ran out.
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
            # Nothing between: what is left of the time goes to the lowest height that is not ruled out.
            height, share, hard = max(target, impossible + 1), 1.0, impossible
    return offsets, best == impossible + 1
