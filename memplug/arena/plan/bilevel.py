"""MEMO's planner (section 4.2, Fig. 7): places each kind of layer once, and then the placed layers in the step.

First level: `exact` places the requests that a layer's forward or backward makes and frees again, once for each pattern
(see `patterns`). Second level: each occurrence of a pattern becomes a pseudo-request as high as the placed pattern,
from its first malloc to its last free. Pseudo-requests are placed together with requests that outlive a layer (MEMO's
skeletal activations). All layers of a pattern have the same addresses inside their pseudo-requests, in every iteration.

Departures: MEMO solves a mixed integer program on each level, and neither program ends in time. Here `exact` and
`search` solve the same problems. This planner finds layers in two ways, by the recorded layers and from the requests
alone, and keeps the lower solution. A pseudo-request is a rectangle: free space inside it is not reused.
"""

from __future__ import annotations

import time

import numpy as np

from memplug.arena.plan import exact, search
from memplug.arena.plan.blocks import BlockedProblem, BufferBlock
from memplug.arena.plan.patterns import Stretch, stretches
from memplug.arena.plan.problem import Problem, Solution, solved

_SECONDS_OF_PATTERN = 2.0
_SHARE_OF_PATTERNS, _SHARE_OF_PLACES = 0.3, 0.6


def solve(problem: Problem, *, deadline_s: float | None = None, enough_bytes: int | None = None) -> Solution:
    """Place by two levels, or by the second alone if no layers repeat. Ignore streams; see `streams`.

    Args:
        problem: of one step.
        deadline_s: when to end, on the clock of `time.monotonic`; by default after 10 s.
        enough_bytes: the height to end at; by default the lower bound.
    """
    began = time.monotonic()
    deadline_s = began + 10 if deadline_s is None else deadline_s
    enough = max(enough_bytes or 0, problem.lower_bound)
    share_s = began + (deadline_s - began) * _SHARE_OF_PLACES
    best = _by_two_levels(problem, stretches(problem.buffers), share_s, enough)
    if best.height > enough and time.monotonic() < deadline_s:
        other = _by_two_levels(problem, stretches(problem.buffers, by_place=False), deadline_s, enough)
        best = min(best, other, key=lambda solution: solution.height)
    seconds = time.monotonic() - began
    return solved(problem, best.offsets, "bilevel", seconds=seconds, timed_out=best.timed_out)


def _by_two_levels(problem: Problem, found: list[Stretch], deadline_s: float, enough_bytes: int) -> Solution:
    now = time.monotonic()
    inner = _place_patterns(problem, found, now + (deadline_s - now) * _SHARE_OF_PATTERNS)
    blocks = BlockedProblem.of(problem, [BufferBlock(stretch.rows, inner[stretch.pattern]) for stretch in found])
    planner = exact if len(blocks.problem) <= exact.PROMISING else search
    outer = planner.solve(blocks.problem, deadline_s=deadline_s, enough_bytes=enough_bytes)
    return solved(problem, blocks.expand(outer.offsets), "bilevel", timed_out=outer.timed_out)


def _place_patterns(problem: Problem, found: list[Stretch], deadline_s: float) -> dict[bytes, np.ndarray]:
    """Place one stretch of each pattern; return the offsets of its rows inside the block."""
    examples = {stretch.pattern: stretch for stretch in found}
    placed = {}
    for left, (pattern, stretch) in zip(range(len(examples), 0, -1), examples.items(), strict=True):
        now = time.monotonic()
        seconds = min(_SECONDS_OF_PATTERN, max(0.0, deadline_s - now) / left)
        placed[pattern] = exact.solve(problem.part(stretch.rows), deadline_s=now + seconds).offsets
    return placed
