"""What the map of a plan draws: rectangles of address and time in groups of one colour, and memory in use above them.

Thousands of requests share a pixel, and most live so short that they are narrower than one. The raster gives each at
least one pixel; the longest-lived are painted last, so that what is short shows where nothing else is. Only the largest
rectangles are drawn as such on top of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplug.plan.layout.problem import Problem, live_bytes
from memplug.plan.schema import MemoryPlan
from memplug.show.groups import Group, Grouping, by_layer, by_phase, layer_colours
from memplug.show.timeline import Runs, m4, runs
from memplug.show.words import size

_SIZE_CLASSES = 6
_CURVE_BINS = 1000


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class LayoutMap:
    """A plan to look at.

    Attributes:
        begin, end: of the clock: the first lower and the last upper.
        lower, upper, start, stop: int64[n] of each request, on the clock and in bytes.
        views: what requests are coloured by, with the group of each: "phase" and "layer", or "size".
        times, live: the curve of the bytes in use, int64 each, reduced without losing a maximum.
        peak: index into `times` of the most bytes in use, the first of them.
        phase_runs, layer_runs: what ran; empty where the problem does not say.
    """

    begin: int
    end: int
    lower: np.ndarray
    upper: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    views: dict[str, tuple[tuple[Group, ...], np.ndarray]]
    times: np.ndarray
    live: np.ndarray
    peak: int
    phase_runs: Runs
    layer_runs: Runs


def layout_map(plan: MemoryPlan) -> LayoutMap:
    """Of any plan, also of one without requests."""
    problem = plan.problem
    table, offsets = problem.buffers, plan.solution.offsets
    begin, end = int(table["lower"].min(initial=2**62)), int(table["upper"].max(initial=0))
    begin = min(begin, end)
    times, live = live_bytes(table)
    if len(times) > 4 * _CURVE_BINS:
        kept = m4(live, times - begin, end - begin, _CURVE_BINS)
        times, live = times[kept], live[kept]
    return LayoutMap(
        begin=begin,
        end=max(end, begin + 1),
        lower=table["lower"],
        upper=table["upper"],
        start=offsets,
        stop=offsets + table["size"],
        views=_views(problem),
        times=times,
        live=live,
        peak=int(live.argmax()) if len(live) else 0,
        phase_runs=_runs(problem, "phase", begin, end),
        layer_runs=_runs(problem, "layer", begin, end),
    )


def raster(drawn: LayoutMap, of: np.ndarray, height_bytes: int, shape: tuple[int, int]) -> np.ndarray:
    """The map in pixels.

    Args:
        drawn: the plan.
        of: a value in 1..255 for each request, such as its group + 1.
        height_bytes: of the arena, the upper edge.
        shape: rows, the first one at address 0, and columns.

    Returns:
        uint8[shape]; 0: nothing there.
    """
    rows, columns = shape
    picture = np.zeros(shape, np.uint8)
    across = columns / (drawn.end - drawn.begin)
    up = rows / max(height_bytes, 1)
    left = np.clip(np.floor((drawn.lower - drawn.begin) * across).astype(np.int64), 0, columns - 1)
    right = np.maximum(left + 1, np.round((drawn.upper - drawn.begin) * across).astype(np.int64))
    bottom = np.clip(np.floor(drawn.start * up).astype(np.int64), 0, rows - 1)
    top = np.maximum(bottom + 1, np.round(drawn.stop * up).astype(np.int64))
    order = np.lexsort((drawn.stop - drawn.start, drawn.upper - drawn.lower))
    edges = np.stack([bottom, top, left, right, of.astype(np.int64)], axis=1)[order]
    # Of equal pixels only the last would be seen.
    _, last = np.unique(edges[::-1, :4], axis=0, return_index=True)
    for low, high, first, end, value in edges[np.sort(len(edges) - 1 - last)].tolist():
        picture[low:high, first:end] = value
    return picture


def largest(drawn: LayoutMap, count: int) -> np.ndarray:
    """Rows of the requests with the largest rectangles, at most so many: int64, rising."""
    area = (drawn.upper - drawn.lower).astype(np.float64) * (drawn.stop - drawn.start)
    return np.sort(np.argsort(-area, kind="stable")[:count])


def _views(problem: Problem) -> dict[str, tuple[tuple[Group, ...], np.ndarray]]:
    table = problem.buffers
    if not problem.phases:
        return {"size": _by_size(table["size"])}
    found: dict[str, Grouping] = {"phase": by_phase(problem.phases), "layer": by_layer(problem.layers)}
    return {name: (grouping.groups, grouping.of[table[f"lower_{name}"]]) for name, grouping in found.items()}


def _by_size(sizes: np.ndarray) -> tuple[tuple[Group, ...], np.ndarray]:
    """Classes from the smallest to the largest size, each as many times larger than the one before."""
    if not len(sizes):
        return (), np.zeros(0, np.int64)
    edges = np.geomspace(sizes.min(), sizes.max() + 1, _SIZE_CLASSES + 1)[1:-1]
    of = np.searchsorted(edges, sizes, "right")
    found = [sizes[of == index] for index in range(_SIZE_CLASSES)]
    labels = [f"{size(int(part.min()))} to {size(int(part.max()))}" if len(part) else "" for part in found]
    return tuple(map(Group, labels, layer_colours(_SIZE_CLASSES))), of


def _runs(problem: Problem, what: str, begin: int, end: int) -> Runs:
    """What ran, as mallocs and frees tell; from one of them up to the next nothing else is known."""
    # What outlives the step was given the whole of it: where it is asked for and freed says nothing.
    table = problem.buffers[~problem.buffers["outlives"]]
    if (table[f"lower_{what}"] < 0).all():
        return Runs(*np.zeros((3, 0), np.int64))
    values = np.concatenate([table[f"lower_{what}"], table[f"upper_{what}"]]).astype(np.int64)
    times = np.concatenate([table["lower"], table["upper"]])
    order = np.argsort(times, kind="stable")
    places = np.searchsorted(times[order], np.arange(begin, end), "right") - 1
    return runs(values[order][np.maximum(places, 0)], end - begin)
