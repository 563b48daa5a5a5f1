"""STWeaver's planner (section 5.1): groups requests by when they live, then by their size.

Persistent requests, which outlive the step, lie at the bottom. All other requests form HomoPhase groups by the phases
that request and free them (scoped: two phases; transient: one). The planner places each group by itself. It fuses
groups that meet in a phase if that raises their time-memory product (Eq. 1): the share of the rectangle around a group
that is in use. A dense group becomes one large request.

Then all requests form HomoSize groups, which are placed from the largest size down. A memory layer is a range of
addresses as high as one size. A request goes into a free interval of an earlier memory layer if it fits, else into a
new memory layer by Algorithm 1.

Departures from the paper: a group becomes one request only if its time-memory product is at least `DENSE`. If
activations are freed one by one, the rectangle would be half empty, so the members of such a group are placed singly.
The space above a request in a higher memory layer is a free interval too. At the end, greedy placement from the bottom
up lowers all requests.
"""

from __future__ import annotations

import heapq
import time
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field

import numpy as np

from memplug.arena.plan.blocks import BlockedProblem, BufferBlock
from memplug.arena.plan.first_fit import Placer
from memplug.arena.plan.problem import Problem, Solution, solved, time_memory_product

DENSE = 0.97
"""Time-memory product above which a group is placed as one block."""

_HEIGHTS_TRIED, _INTERVALS_TRIED = 32, 16


def solve(problem: Problem, *, deadline_s: float | None = None, enough_bytes: int | None = None) -> Solution:
    """Place requests by phases and sizes; without phases, by sizes alone. Ignore streams; see `streams`.

    Args:
        problem: of one step.
        deadline_s: on the clock of `time.monotonic`; after it, groups are no longer fused.
        enough_bytes: ignored: this planner cannot end at a height.
    """
    began = time.monotonic()
    offsets = Placer.of(problem.buffers).place(np.argsort(by_groups(problem, deadline_s), kind="stable"))
    return solved(problem, offsets, "spatiotemporal", seconds=time.monotonic() - began)


def by_groups(problem: Problem, deadline_s: float | None = None) -> np.ndarray:
    """Return the offsets by groups, before `solve` lowers all requests. int64[n], bytes."""
    table = problem.buffers
    offsets = np.zeros(len(problem), np.int64)
    unit = int(np.lcm.reduce(np.unique(table["alignment"]), initial=1))
    persistent = _persistent(problem)
    floor = _stack(table, persistent, unit, offsets)
    others = np.flatnonzero(~persistent)
    if len(others):
        blocks = BlockedProblem.of(problem.part(others), _dense_groups(problem.part(others), deadline_s))
        offsets[others] = floor + blocks.expand(_by_sizes(blocks.problem, unit))
    return offsets


def _persistent(problem: Problem) -> np.ndarray:
    table = problem.buffers
    whole = (table["lower"] == table["lower"].min(initial=0)) & (table["upper"] == table["upper"].max(initial=0))
    return table["outlives"] | whole


def _stack(table: np.ndarray, rows: np.ndarray, unit: int, offsets: np.ndarray) -> int:
    """Place rows one above another, and write their `offsets`; return the offset above them."""
    ends = (-(-table["size"][rows] // unit) * unit).cumsum()
    offsets[rows] = np.concatenate([[0], ends])[: len(ends)]
    return int(ends[-1]) if len(ends) else 0


# -- HomoPhase groups --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Group:
    """The placement of one HomoPhase group.

    Attributes:
        first_phase, last_phase: the phases that request and free its members.
        rows: its requests, as rows of the problem.
        offsets: int64, aligned with `rows`.
        product: its time-memory product.
        weight: bytes times duration of the rectangle around the group.
    """

    first_phase: int
    last_phase: int
    rows: np.ndarray
    offsets: np.ndarray
    product: float
    weight: float


def _dense_groups(problem: Problem, deadline_s: float | None) -> list[BufferBlock]:
    table = problem.buffers
    known = np.flatnonzero((table["lower_phase"] >= 0) & (table["upper_phase"] >= 0))
    if not len(known):
        return []
    keys = np.stack([table["lower_phase"][known], table["upper_phase"][known]])
    found, group = np.unique(keys, axis=1, return_inverse=True)
    order = np.argsort(group.reshape(-1), kind="stable")
    bounds = np.searchsorted(group.reshape(-1)[order], np.arange(found.shape[1] + 1))
    groups = []
    for (first, last), begin, end in zip(found.T.tolist(), bounds[:-1], bounds[1:], strict=True):
        rows = known[np.sort(order[begin:end])]
        groups.append(_local_plan(table, first, last, rows, np.argsort(-table["size"][rows], kind="stable")))
    fused = fuse(table, groups, deadline_s)
    return [BufferBlock(each.rows, each.offsets) for each in fused if len(each.rows) > 1 and each.product >= DENSE]


def _local_plan(table: np.ndarray, first: int, last: int, rows: np.ndarray, order: np.ndarray) -> _Group:
    members = table[rows]
    offsets = Placer.of(members).place(order)
    height = int((offsets + members["size"]).max())
    duration = int(members["upper"].max() - members["lower"].min())
    return _Group(first, last, rows, offsets, time_memory_product(members, offsets), float(height) * duration)


def fuse(table: np.ndarray, groups: list[_Group], deadline_s: float | None = None) -> list[_Group]:
    """Fuse two groups if one ends in the phase where the other begins, and their time-memory product rises.

    Requests of the smaller group are inserted into the placement of the larger: the largest first, at the lowest free
    offset. The product rises if it exceeds the average of the two products, weighted by the groups' rectangles.
    """
    by_first: dict[int, list[_Group]] = {}
    for each in groups:
        by_first.setdefault(each.first_phase, []).append(each)
    fused, gone = [], set()
    for each in groups:
        if id(each) in gone:
            continue
        gone.add(id(each))
        merged = each
        for other in by_first.get(each.last_phase, ()):
            if id(other) in gone or (deadline_s is not None and time.monotonic() >= deadline_s):
                continue
            candidate = _inserted(table, merged, other)
            weight = merged.weight + other.weight
            if candidate.product > (merged.product * merged.weight + other.product * other.weight) / weight:
                merged = candidate
                gone.add(id(other))
        fused.append(merged)
    return fused


def _inserted(table: np.ndarray, a: _Group, b: _Group) -> _Group:
    larger, smaller = (a, b) if a.weight >= b.weight else (b, a)
    rows = np.concatenate([larger.rows, smaller.rows])
    inside = np.argsort(-table["size"][smaller.rows], kind="stable") + len(larger.rows)
    order = np.concatenate([np.argsort(larger.offsets, kind="stable"), inside])
    return _local_plan(table, a.first_phase, b.last_phase, rows, order)


# -- HomoSize groups ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Free:
    """The free intervals (begin, end, offset) of memory layers, by height."""

    by_height: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    heights: list[int] = field(default_factory=list)

    def add(self, height: int, begin: int, end: int, offset: int) -> None:
        """Add a free interval, unless it is empty."""
        if height <= 0 or begin >= end:
            return
        if height not in self.by_height:
            self.by_height[height] = []
            insort(self.heights, height)
        insort(self.by_height[height], (begin, end, offset))

    def take(self, height: int, lower: int, upper: int) -> int | None:
        """Return an offset for a request in the tightest interval that fits during [lower, upper); None: none fits."""
        at = bisect_left(self.heights, height)
        for found in self.heights[at : at + _HEIGHTS_TRIED]:
            intervals = self.by_height[found]
            last = bisect_right(intervals, (lower, upper, 0)) - 1
            while last + 1 < len(intervals) and intervals[last + 1][0] <= lower:
                last += 1
            for index in range(last, max(-1, last - _INTERVALS_TRIED), -1):
                begin, end, offset = intervals[index]
                if end >= upper:
                    del intervals[index]
                    self.add(found, begin, lower, offset)
                    self.add(found, upper, end, offset)
                    self.add(found - height, lower, upper, offset + height)
                    return offset
        return None


def _by_sizes(problem: Problem, unit: int) -> np.ndarray:
    """Return the offsets of requests, placed from the largest size down."""
    table = problem.buffers
    heights = -(-table["size"] // unit) * unit
    lower, upper = table["lower"].tolist(), table["upper"].tolist()
    begin, end = min(lower), max(upper)
    offsets = np.zeros(len(table), np.int64)
    free, top = _Free(), 0
    order = np.lexsort((table["lower"], -heights))
    borders = np.flatnonzero(np.diff(heights[order], prepend=-1, append=-1))
    for first, last in zip(borders[:-1], borders[1:], strict=True):
        height = int(heights[order[first]])
        left = []
        for row in order[first:last].tolist():
            offset = free.take(height, lower[row], upper[row])
            if offset is None:
                left.append(row)
            else:
                offsets[row] = offset
        for layer in memory_layers([(lower[row], upper[row]) for row in left]):
            before = begin
            for member in layer:
                row = left[member]
                offsets[row] = top
                free.add(height, before, lower[row], top)
                before = upper[row]
            free.add(height, before, end, top)
            top += height
    return offsets


def memory_layers(lifetimes: list[tuple[int, int]]) -> list[list[int]]:
    """Divide lifetimes among memory layers by Algorithm 1, such that those in one layer do not overlap.

    There are as few layers as possible: the number of lifetimes that overlap at the busiest instant.

    Args:
        lifetimes: half-open, sorted by beginning.

    Returns:
        For each layer, the indices into `lifetimes` of its members, in the order of time.
    """
    layers: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (end of its last lifetime, layer), for layers not in use; sorted
    busy: list[tuple[int, int]] = []
    for index, (lower, upper) in enumerate(lifetimes):
        while busy and busy[0][0] <= lower:
            free.append(heapq.heappop(busy))
        if free:
            # The last layer in the list has been free for the shortest time.
            layer = free.pop()[1]
        else:
            layer = len(layers)
            layers.append([])
        layers[layer].append(index)
        heapq.heappush(busy, (upper, layer))
    return layers
