"""Merges several placed buffers into one block, in which they keep their relative offsets."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from memplug.arena.plan.problem import BUFFER, Problem


@dataclass(frozen=True, slots=True)
class BufferBlock:
    """Buffers that move together.

    Attributes:
        rows: rows of the problem, int64[k].
        offsets: offsets inside the block, int64[k], bytes.
        lower, upper: when the block is in use; by default from the first malloc to the last free.
    """

    rows: np.ndarray
    offsets: np.ndarray
    lower: int | None = None
    upper: int | None = None


@dataclass(frozen=True, slots=True)
class BlockedProblem:
    """A problem in which some buffers are merged into blocks.

    Attributes:
        problem: the blocks first, then the other buffers.
    """

    problem: Problem
    _blocks: list[BufferBlock]
    _alone: np.ndarray
    _count: int

    @staticmethod
    def of(problem: Problem, blocks: list[BufferBlock]) -> BlockedProblem:
        """Return the problem with these blocks merged; blocks must be disjoint and not empty."""
        table = problem.buffers
        alone = np.ones(len(table), bool)
        merged = np.zeros(len(blocks), BUFFER)
        for at, block in enumerate(blocks):
            rows = table[block.rows]
            alone[block.rows] = False
            merged[at] = rows[0]
            merged["lower"][at] = rows["lower"].min() if block.lower is None else block.lower
            merged["upper"][at] = rows["upper"].max() if block.upper is None else block.upper
            merged["size"][at] = (block.offsets + rows["size"]).max()
            merged["alignment"][at] = np.lcm.reduce(rows["alignment"])
        singles = np.flatnonzero(alone)
        whole = replace(problem, buffers=np.concatenate([merged, table[singles]]), ids=None)
        return BlockedProblem(whole, blocks, singles, len(table))

    def expand(self, offsets: np.ndarray) -> np.ndarray:
        """Return the offsets of the original buffers, given offsets of the buffers of `problem`. int64[n], bytes."""
        found = np.zeros(self._count, np.int64)
        for block, offset in zip(self._blocks, offsets[: len(self._blocks)].tolist(), strict=True):
            found[block.rows] = offset + block.offsets
        found[self._alone] = offsets[len(self._blocks) :]
        return found
