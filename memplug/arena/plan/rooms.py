"""Leaves room in a plan for dynamic requests: those whose sizes, or whether they come, other steps showed to vary.

STWeaver (section 5.2) serves dynamic requests from bytes that the planned ones happen to leave. A planner that places
all others as tightly as it can leaves few. So the bottom of the arena is theirs, as high at each time as the recorded
steps needed, and all planned requests lie above. Served there from two ends, as the arena serves them, what one layer
does not need another one gets: the room holds the sum of what all layers have in use, not the sum of their largest.

The room's height over time is a staircase. Its steps are rectangles of bytes and time, one above another: buffers that
no request has. Planners place them before all others (`first_fit.Placer`), and the judge checks that no request's
buffer meets one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from memplug.arena.plan.dynamic import Key
from memplug.arena.plan.dynamic_steps import Groups, ServedStep
from memplug.arena.plan.problem import BUFFER, Problem
from memplug.profile.trace import Trace
from memplug.sizes import BLOCK_BYTES, rounded_up

LEVELS = 256
"""The room has at most so many heights."""

LEAST_SPARE, MOST_SPARE = 0.005, 0.25
"""The room is higher than the recorded steps needed: by a standard deviation of the arena's height that each of them
needed, as far as that is from 0.5 to 25 % of it."""

THRESHOLDS = 6
"""So many lifetimes are tried as the border between requests at the bottom of the room and those at its top."""

MOST_OVER = 1.25
"""Torch's allocator is taken to need this many times the bytes of the dynamic requests that are in use at once.

A plan has no room if the arena with a room needs more than the arena without one and torch's allocator together.
"""


def with_rooms(
    problem: Problem, step: Trace, others: Sequence[Trace], margin_bytes: int = 0, seconds: float = 0.5
) -> tuple[Problem, frozenset[Key]]:
    """Return the problem with a room for the step's dynamic requests, and the groups that the room's top serves.

    Without a room, dynamic requests have the bytes that the planned ones happen to leave, and torch's allocator. The
    problem has no room if one takes more bytes than torch's allocator would.

    Args:
        problem: the step's other requests.
        step: one step, with its dynamic requests marked.
        others: other steps of the same program, marked too (`memplug.profile.varying.observed`).
        margin_bytes: bytes that follow each request in the arena.
        seconds: time for the search of the groups that the top serves.
    """
    groups = Groups.of(step, problem.main_stream)
    if not groups.keys:
        return problem, frozenset()
    steps = [ServedStep.of(each, groups, margin_bytes) for each in (step, *others)]
    planned = groups.planned_bytes(problem.buffers)
    hangs = _best_sides(steps, groups, planned, time.monotonic() + seconds)
    height = _height(steps, groups, hangs)
    dynamic_bytes = max(int(each.live_bytes(groups.instants).max()) for each in steps)
    if (height + planned).max() > planned.max() + MOST_OVER * dynamic_bytes:
        return problem, frozenset()
    spare = _spare_bytes([_height([each], groups, hangs) + planned for each in steps])
    higher = height * (1 + spare / max(1, int(height.max())))
    rectangles = staircase(np.ceil(higher).astype(np.int64), groups.begins, problem.main_stream)
    return problem.with_more(rectangles), frozenset(
        key for key, hanging in zip(groups.keys, hangs.tolist(), strict=False) if hanging
    )


def _best_sides(steps: Sequence[ServedStep], groups: Groups, planned: np.ndarray, deadline_s: float) -> np.ndarray:
    """Return which groups the room's top serves, so that the arena becomes as low as possible. bool[groups].

    Args:
        steps: the recorded steps.
        groups: their groups.
        planned: bytes that planned requests have in use in each instant, int64[instants].
        deadline_s: when to end, on the clock of `time.monotonic`.
    """

    def needed(hangs: np.ndarray) -> int:
        return int((_height(steps, groups, hangs) + planned).max())

    best = min(_by_lifetime(groups), key=needed)
    least, before = needed(best), None
    while before != least:
        before = least
        for group in range(len(best)):
            if time.monotonic() >= deadline_s:
                return best
            other = best.copy()
            other[group] = not other[group]
            if (nbytes := needed(other)) < least:
                best, least = other, nbytes
    return best


def _by_lifetime(groups: Groups) -> list[np.ndarray]:
    """Return which groups the room's top may serve, bool[groups] each: none, or those that live short enough."""
    lived = groups.windows[:, 1] - groups.windows[:, 0]
    borders = np.unique(np.quantile(lived, np.linspace(0, 1, THRESHOLDS + 1), method="nearest"))
    return [np.zeros(len(lived), bool), *(lived <= border for border in borders)]


def _height(steps: Sequence[ServedStep], groups: Groups, hangs: np.ndarray) -> np.ndarray:
    """Return the room's height in each instant, bytes: each group finds all that it needs throughout its window."""
    served = [each.height(hangs, groups.instants) for each in steps]
    height = np.max([most for most, _ in served], axis=0)
    ends = np.max([ends for _, ends in served], axis=0)
    windows = groups.windows.tolist()
    for (begin, end), least in zip(windows, ends.tolist(), strict=True):
        np.maximum(height[begin:end], least, out=height[begin:end])
    # What hangs begins at one height throughout its window. Windows may meet, so that one raises another.
    hanging = [windows[at] for at in np.flatnonzero(hangs)]
    changed = True
    while changed:
        changed = False
        for begin, end in hanging:
            most = height[begin:end].max()
            changed = changed or bool((height[begin:end] != most).any())
            height[begin:end] = most
    return height


def _spare_bytes(needed: Sequence[np.ndarray]) -> float:
    """Return how much more the room has than the recorded steps needed, from how much these differ.

    Args:
        needed: for each step, bytes of the arena that it needs in each instant, int64[instants].
    """
    most = [int(each.max()) for each in needed]
    deviation = float(np.std(most, ddof=1)) if len(most) > 1 else 0.0
    return min(MOST_SPARE * max(most), max(LEAST_SPARE * max(most), deviation))


def staircase(height: np.ndarray, begins: np.ndarray, stream: int) -> np.ndarray:
    """Return rectangles below a height, of dtype BUFFER: each one comes after the one on which it lies.

    Args:
        height: bytes in each of n spans of time, int64[n].
        begins: the instants at which these spans begin, and the end of the last one, int64[n + 1].
        stream: the stream of the requests that the rectangles are for.
    """
    unit = rounded_up(int(height.max(initial=0)) // LEVELS + 1, BLOCK_BYTES)
    levels = [*rounded_up(height, unit).tolist(), 0]
    found: list[tuple[int, int, int]] = []
    open_: list[tuple[int, int]] = []  # (first instant, level): rectangles that have not ended, each above the last
    for at, level in enumerate(levels):
        begin = at
        while open_ and open_[-1][1] > level:
            begin, top = open_.pop()
            below = max(open_[-1][1] if open_ else 0, level)
            found.append((begin, at, top - below))
        if level > (open_[-1][1] if open_ else 0):
            open_.append((begin, level))
    table = np.zeros(len(found), BUFFER)
    begin, end, size = np.array(found[::-1], np.int64).reshape(-1, 3).T
    table["lower"], table["upper"], table["size"] = begins[begin], begins[end], size
    table["alignment"], table["stream"], table["room"] = BLOCK_BYTES, stream, True
    for column in ("lower_phase", "upper_phase", "lower_layer", "upper_layer"):
        table[column] = -1
    return table[table["upper"] > table["lower"]]
