"""Changes a plan's problem after steps have shown where it falls short, without a new recording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from memplug.arena.arena import Counters
from memplug.arena.plan.problem import Problem
from memplug.sizes import BLOCK_BYTES, rounded_up

MOST_AMENDMENTS = 16
"""One plan may be amended so often for late blocks, and as often again for more room."""

MISSED_SHARE = 0.002
"""A step lacks room if more than this share of its dynamic requests' bytes finds none."""

MISSED_STEPS = 2
"""After so many steps that lack room, the room grows."""

MOST_GROWTH = 0.05
"""The room grows by at most this share of its bytes at once, or by the largest request that found none."""


class Lack:
    """Counts the steps whose dynamic requests lacked room, since it grew last, and the bytes that found none."""

    def __init__(self) -> None:
        self._steps = self._most_bytes = self._largest_bytes = 0

    def end_step(self, step: Counters) -> None:
        """Count a step, by `dynamic_bytes`, `dynamic_missed_bytes` and `dynamic_missed_largest`."""
        missed = step.dynamic_missed_bytes
        if missed > MISSED_SHARE * (step.dynamic_bytes + missed):
            self._steps += 1
            self._most_bytes = max(self._most_bytes, missed)
            self._largest_bytes = max(self._largest_bytes, step.dynamic_missed_largest)

    @property
    def lasts(self) -> bool:
        """Return whether enough steps lacked room."""
        return self._steps >= MISSED_STEPS

    def with_more_room(self, problem: Problem) -> Problem:
        """Return the problem with a room for the bytes that found none, or for as many as it may grow by."""
        share = min(max(MOST_GROWTH * problem.room_bytes, self._largest_bytes), self._most_bytes) / problem.room_bytes
        buffers, room = problem.buffers.copy(), problem.buffers["room"]
        buffers["size"][room] = rounded_up(np.ceil(buffers["size"][room] * (1 + share)).astype(np.int64), BLOCK_BYTES)
        return replace(problem, buffers=buffers)


def with_longer_lives(problem: Problem, late: Sequence[Sequence[int]]) -> Problem:
    """Return the problem with lifetimes of late blocks twice as long as observed.

    Args:
        problem: of the plan.
        late: pairs of rows: a late buffer, and one that found its bytes still in use.
    """
    buffers, end = problem.buffers.copy(), int(problem.buffers["upper"].max())
    for row, other in late:
        lower, seen = int(buffers["lower"][row]), int(buffers["lower"][other]) + 1
        buffers["upper"][row] = max(min(2 * seen - lower, end), int(buffers["upper"][row]))
    return replace(problem, buffers=buffers)
