"""Several streams made one: afterwards two buffers may share bytes wherever their lifetimes do not overlap.

What a stream frees, another may use only once it has been made to wait for it. So a buffer of a side stream is held
from the last time that its stream waited for the main one to the next time that the main one waits for its. Two buffers
of different streams whose held times do not overlap have such waits between them, if need be through the main stream.
Buffers of one side stream that are held at overlapping times are one block, inside of which the order of their own
stream is enough. Without orderings a side stream has bytes of its own for the whole step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from memplug.arena.plan.blocks import Block, Blocks
from memplug.arena.plan.problem import Problem


def on_one_stream(problem: Problem, place: Callable[[Problem], np.ndarray]) -> Blocks:
    """The problem as one of a single stream, in which planners need not know of streams.

    Args:
        problem: of any number of streams. The one with the most bytes is the main stream.
        place: offsets for buffers of one stream, such as of a quick planner: int64[n].
    """
    table = problem.buffers
    streams, main = np.unique(table["stream"]), problem.main_stream
    blocks = []
    for stream in streams[streams != main].tolist():
        rows = np.flatnonzero(table["stream"] == stream)
        lower, upper = _held(problem, rows, stream, main)
        order = np.argsort(lower, kind="stable")
        rows, lower, upper = rows[order], lower[order], upper[order]
        # A block ends where every earlier buffer is freed.
        begins = np.flatnonzero(np.concatenate([[True], lower[1:] >= np.maximum.accumulate(upper)[:-1]]))
        for begin, end in zip(begins, np.append(begins[1:], len(rows)), strict=True):
            part = rows[begin:end]
            held = (int(lower[begin:end].min()), int(upper[begin:end].max()))
            blocks.append(Block(part, place(problem.part(part)), *held))
    return Blocks.of(problem, blocks)


def _held(problem: Problem, rows: np.ndarray, stream: int, main: int) -> tuple[np.ndarray, np.ndarray]:
    """From when to when the bytes of a side stream's buffers are out of reach for other streams: int64 each."""
    table, orderings = problem.buffers, problem.orderings
    begin, end = int(table["lower"].min()), int(table["upper"].max())
    into = orderings["time"][(orderings["before"] == main) & (orderings["after"] == stream)]
    back = orderings["time"][(orderings["before"] == stream) & (orderings["after"] == main)]
    # One earlier: of two orderings at one instant, only the first can be before the second.
    lower = np.append(into - 1, begin)[np.searchsorted(into, table["lower"][rows], "right") - 1]
    upper = np.append(back, end)[np.searchsorted(back, table["upper"][rows], "left")]
    return np.maximum(lower, begin), np.maximum(upper, table["upper"][rows])
