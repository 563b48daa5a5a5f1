"""Reduces a problem of several streams to one stream, where buffers may share bytes if their lifetimes do not overlap.

Before a stream uses bytes that another stream has freed, it has to wait for that stream. So the reduction extends the
lifetimes of buffers on side streams (all but the main one). The extended lifetime begins at the side stream's last wait
for the main stream before the malloc. It ends at the main stream's first wait for the side stream after the free. If
the extended lifetimes of buffers on two streams do not overlap, the later stream has waited for the earlier one,
directly or through the main stream.

Buffers of one side stream whose extended lifetimes overlap form one block; inside the block the order of their stream
is enough. Without orderings, a side stream has bytes of its own for the whole step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from memplug.arena.plan.blocks import BlockedProblem, BufferBlock
from memplug.arena.plan.problem import Problem


def on_one_stream(problem: Problem, place: Callable[[Problem], np.ndarray]) -> BlockedProblem:
    """Return the problem on a single stream, for planners that ignore streams.

    Args:
        problem: any number of streams. The one with the most bytes is the main stream.
        place: a quick planner for buffers of one stream; returns their offsets, int64[n].
    """
    table = problem.buffers
    streams, main = np.unique(table["stream"]), problem.main_stream
    blocks = []
    for stream in streams[streams != main].tolist():
        rows = np.flatnonzero(table["stream"] == stream)
        lower, upper = _held(problem, rows, stream, main)
        order = np.argsort(lower, kind="stable")
        rows, lower, upper = rows[order], lower[order], upper[order]
        # A block ends where the extended lifetimes of all its buffers have ended.
        begins = np.flatnonzero(np.concatenate([[True], lower[1:] >= np.maximum.accumulate(upper)[:-1]]))
        for begin, end in zip(begins, np.append(begins[1:], len(rows)), strict=True):
            part = rows[begin:end]
            held = (int(lower[begin:end].min()), int(upper[begin:end].max()))
            blocks.append(BufferBlock(part, place(problem.part(part)), *held))
    return BlockedProblem.of(problem, blocks)


def _held(problem: Problem, rows: np.ndarray, stream: int, main: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the extended lifetimes of a side stream's buffers: where they begin, and where they end. int64[n] each."""
    table, orderings = problem.buffers, problem.orderings
    begin, end = int(table["lower"].min()), int(table["upper"].max())
    into = orderings["time"][(orderings["before"] == main) & (orderings["after"] == stream)]
    back = orderings["time"][(orderings["before"] == stream) & (orderings["after"] == main)]
    # Begin one instant before the ordering: two orderings at one instant may come in either order, so one lifetime must
    # not begin at the very instant at which another ends.
    lower = np.append(into - 1, begin)[np.searchsorted(into, table["lower"][rows], "right") - 1]
    upper = np.append(back, end)[np.searchsorted(back, table["upper"][rows], "left")]
    return np.maximum(lower, begin), np.maximum(upper, table["upper"][rows])
