"""Finds reusable space, by group, for requests whose sizes are known only at run time.

STWeaver, section 5.2: dynamic requests that one layer makes and another frees form a HomoLayer group (Eq. 2). Their
sizes are unknown, but all of them live between the beginning of the first layer and the end of the second. The bytes
that no planned buffer uses in that time are the group's dynamic reusable space (Eq. 3 to 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from memplug.arena.plan.from_trace import TRAINING
from memplug.arena.plan.part import DynamicSpace
from memplug.arena.plan.problem import Problem, Solution
from memplug.profile.trace import Trace
from memplug.sizes import BLOCK_BYTES, rounded_up

Key = tuple[int, ...]
"""A HomoLayer group: its values of `GROUP`."""

GROUP = ("malloc_phase", "malloc_layer", "free_phase", "free_layer", "stream")


def dynamic_spaces(
    step: Trace, problem: Problem, solution: Solution, hanging: frozenset[Key] = frozenset()
) -> tuple[DynamicSpace, ...]:
    """Return the reusable space of each HomoLayer group on one stream, in the order of phases and layers.

    Args:
        step: one step, whose dynamic requests have no addresses.
        problem: the step's other requests, on the same clock.
        solution: of that problem.
        hanging: the groups, by their values of `GROUP`, that the top of the problem's room serves.
    """
    rows = dynamic_requests(step)
    if not len(rows):
        return ()
    keys, group = np.unique(np.stack([rows[name] for name in GROUP], axis=1), axis=0, return_inverse=True)
    order = np.argsort(group, kind="stable")
    bounds = np.searchsorted(group.reshape(-1)[order], np.arange(len(keys) + 1))
    members = [np.sort(order[begin:end]) for begin, end in zip(bounds[:-1], bounds[1:], strict=True)]
    spans = spans_of(step)
    windows = [
        window(key, rows[of_it], spans, len(step.events)) for key, of_it in zip(keys.tolist(), members, strict=True)
    ]
    return tuple(
        DynamicSpace(
            **dict(zip(GROUP, key, strict=True)),
            lower=lived[0],
            upper=lived[1],
            spaces=spaces,
            mallocs=tuple(rows["malloc_event"][of_it].tolist()),
            peak_bytes=_peak_bytes(rows[of_it]),
            ceiling=_ceiling(problem, solution, lived) if tuple(key) in hanging else 0,
        )
        for key, of_it, lived, spaces in zip(
            keys.tolist(), members, windows, idle_spaces(problem, solution, windows), strict=True
        )
    )


def renewed_spaces(spaces: Sequence[DynamicSpace], problem: Problem, solution: Solution) -> tuple[DynamicSpace, ...]:
    """Return the same groups, with the spaces that another solution leaves free in their windows of time.

    Args:
        spaces: the groups, on the same clock.
        problem: the new problem.
        solution: of the new problem.
    """
    windows = [(group.lower, group.upper) for group in spaces]
    renewed = idle_spaces(problem, solution, windows)
    return tuple(
        replace(group, spaces=of_it, ceiling=_ceiling(problem, solution, lived) if group.ceiling else 0)
        for group, lived, of_it in zip(spaces, windows, renewed, strict=True)
    )


def _ceiling(problem: Problem, solution: Solution, lived: tuple[int, int]) -> int:
    """Return the lowest offset that the problem's room has as its top in a window of time."""
    table = problem.buffers
    whole = table["room"] & (table["lower"] <= lived[0]) & (table["upper"] >= lived[1])
    return int((solution.offsets + table["size"])[whole].max(initial=0))


def dynamic_peak_bytes(step: Trace) -> int:
    """Return the most bytes that a step's dynamic requests have in use at once, each rounded up to whole blocks."""
    return _peak_bytes(dynamic_requests(step))


def served(step: Trace, spaces: tuple[DynamicSpace, ...]) -> tuple[int, int]:
    """Return the number and the bytes of a step's dynamic requests that would have found room in the arena.

    A request gets the lowest bytes of its group's space that no other dynamic request has in use, or the highest ones
    below the group's ceiling. If there are none, torch's allocator serves the request.

    Args:
        step: the recorded step.
        spaces: the spaces of the step's plan.
    """
    rows = dynamic_requests(step)
    of_group = {tuple(getattr(space, name) for name in GROUP): space for space in spaces}
    numbers = {int(number): at for at, number in enumerate(rows["number"])}
    events = step.events
    concerned = np.flatnonzero(np.isin(events["request"], rows["number"]))
    live: dict[int, tuple[int, int]] = {}
    requests = nbytes = 0
    for request in events["request"][concerned].tolist():
        if request in live:
            del live[request]
            continue
        at = numbers.pop(request, None)
        if at is None:  # a free of a request that found no room
            continue
        row = rows[at]
        size = rounded_up(int(row["nbytes"]), BLOCK_BYTES)
        taken = sorted(live.values())
        group = of_group[tuple(row[list(GROUP)].item())]
        free = [stretch for space in group.spaces for stretch in _without(space, taken)]
        below = [min(end, group.ceiling) - size for begin, end in free if min(end, group.ceiling) - size >= begin]
        starts = [begin for begin, end in free if end - begin >= size]
        if starts:
            start = max(below, default=starts[0])
            live[request] = (start, start + size)
            requests, nbytes = requests + 1, nbytes + size
    return requests, nbytes


def dynamic_requests(step: Trace) -> np.ndarray:
    """Return the dynamic requests above 0 bytes of the training threads, in order, of dtype REQUEST."""
    rows = step.requests
    return rows[rows["dynamic"] & (rows["nbytes"] > 0) & (rows["malloc_thread"] == TRAINING)]


def spans_of(step: Trace) -> dict[tuple[int, int], tuple[int, int]]:
    """Return the range [first, end) of the events of each phase and layer."""
    phase, layer = step.events["phase"].astype(np.int64), step.events["layer"].astype(np.int64)
    width = len(step.layers) + 1
    places, first = np.unique(phase * width + layer + 1, return_index=True)
    last = len(phase) - np.unique((phase * width + layer + 1)[::-1], return_index=True)[1]
    return {
        (place // width, place % width - 1): (begin, end)
        for place, begin, end in zip(places.tolist(), first.tolist(), last.tolist(), strict=True)
    }


def window(
    key: list[int], members: np.ndarray, spans: dict[tuple[int, int], tuple[int, int]], events: int
) -> tuple[int, int]:
    """Return the window from the malloc layer's beginning to the free layer's end; it covers all recorded lifetimes."""
    malloc_phase, malloc_layer, free_phase, free_layer, _ = key
    lower = min(spans[malloc_phase, malloc_layer][0], int(members["malloc_event"].min()))
    if free_phase < 0:
        return lower, events
    return lower, max(spans[free_phase, free_layer][1], int(members["free_event"].max()) + 1)


def idle_spaces(
    problem: Problem, solution: Solution, windows: Sequence[tuple[int, int]]
) -> list[tuple[tuple[int, int], ...]]:
    """Return for each window of the clock the ranges [begin, end) of bytes that no planned buffer uses, sorted."""
    planned = np.flatnonzero(~problem.buffers["room"])
    table, offsets = problem.buffers[planned], solution.offsets[planned]
    by_lower = np.argsort(table["lower"], kind="stable")
    lower, upper = table["lower"][by_lower], table["upper"][by_lower]
    starts = offsets[by_lower]
    ends = starts + table["size"][by_lower]
    found: list[tuple[tuple[int, int], ...]] = [()] * len(windows)
    # Visit windows in the order of their beginnings. `in_use` has the buffers in use when the window begins; all other
    # buffers that matter begin inside the window.
    in_use, seen = np.zeros(0, np.int64), 0
    for at in sorted(range(len(windows)), key=windows.__getitem__):
        begin, end = np.searchsorted(lower, windows[at], "left")
        in_use = np.concatenate([in_use, np.arange(seen, begin)])
        in_use, seen = in_use[upper[in_use] > windows[at][0]], int(begin)
        rows = np.concatenate([in_use, np.arange(begin, end)])
        found[at] = _complement(starts[rows], ends[rows], solution.height)
    return found


def _complement(starts: np.ndarray, ends: np.ndarray, height: int) -> tuple[tuple[int, int], ...]:
    order = np.argsort(starts)
    begins = np.concatenate([[0], np.maximum.accumulate(ends[order])])
    stops = np.concatenate([starts[order], [height]])
    is_free = stops > begins
    return tuple(zip(begins[is_free].tolist(), stops[is_free].tolist(), strict=True))


def _peak_bytes(rows: np.ndarray) -> int:
    """Return the most bytes that the requests have in use at once."""
    sizes = rounded_up(rows["nbytes"], BLOCK_BYTES)
    last = rows["malloc_event"].max(initial=0) + 1
    times = np.concatenate([rows["malloc_event"], np.where(rows["free_event"] < 0, last, rows["free_event"])])
    order = np.argsort(times, kind="stable")
    return int(np.concatenate([sizes, -sizes])[order].cumsum().max(initial=0))


def _without(space: tuple[int, int], taken: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges of `space` outside of the `taken` ranges, which are disjoint and sorted."""
    begin, end = space
    free = []
    for start, stop in taken:
        if stop <= begin or start >= end:
            continue
        if start > begin:
            free.append((begin, start))
        begin = max(begin, stop)
    return [*free, (begin, end)] if begin < end else free
