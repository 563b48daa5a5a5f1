"""Draws a plan's addresses as a column of a figure: rectangles of address and time, and bytes in use above them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memplug.arena.plan.part import AddressPlan
from memplug.arena.plan.problem import Problem, live_bytes
from memplug.figures.clock import m4, runs, strips
from memplug.figures.figure import (
    PEAK,
    Axis,
    Callout,
    ColourGroup,
    Column,
    Line,
    Panel,
    Rectangles,
    Spaces,
    Stack,
    Stretches,
    bytes_axis,
)
from memplug.figures.groups import by_layer, by_phase, phase_words, sequence
from memplug.words import size

_IN_USE = ColourGroup("in use", "#9fb4c7")
_SIZE_CLASSES = 6
_CURVE_BINS = 1000
_CURVE_ROOM = 1.35  # the axis ends at this many heights of the arena, so that the arena's label fits
_REUSABLE_AT_MOST = 12  # groups whose reusable space is drawn; more would hide everything


def column(plan: AddressPlan) -> Column:
    """Return the map of a plan's addresses."""
    problem, clock = plan.problem, span(plan.problem)
    reusable = tuple(
        (group.lower, group.upper, start, end)
        for group in plan.dynamic[:_REUSABLE_AT_MOST]
        for start, end in group.spaces
    )
    addresses = Panel(
        y=bytes_axis("address", plan.solution.height, grid=False),
        height=19,
        views=rectangles(plan),
        content=(Spaces(reusable, "reusable space"),) if reusable else (),
    )
    phase_runs, layer_runs = (_runs(problem, what, clock) for what in ("phase", "layer"))
    below = strips(problem.phases, problem.layers, phase_runs, layer_runs, _clock(problem))
    title = "event of the step, running number" if problem.phases else "time"
    return Column(x=Axis(title=title, low=clock[0], high=clock[1]), panels=(_curve(plan, clock), addresses, *below))


def span(problem: Problem) -> tuple[int, int]:
    """Return the ends of the clock: where the first lifetime begins, and where the last one ends."""
    table = problem.buffers
    if not len(table):
        return 0, 1
    return int(table["lower"].min()), int(table["upper"].max())


def _curve(plan: AddressPlan, clock: tuple[int, int]) -> Panel:
    """Draw the bytes in use, their peak, and a line at the arena's height.

    If there are many points, draw only those that `m4` keeps; the peak is one of them.
    """
    times, live = live_bytes(plan.problem.buffers)
    if len(times) > 4 * _CURVE_BINS:
        kept = m4(live, times - clock[0], clock[1] - clock[0], _CURVE_BINS)
        times, live = times[kept], live[kept]
    height, bound = plan.solution.height, plan.problem.lower_bound
    peak = float(times[live.argmax()]) if len(times) else clock[1]
    # Put the label on the side that the peak's mark leaves free.
    arena = Line(y=height, label=f"arena {size(height)}", label_left=2 * peak > sum(clock))
    mark = [Callout(peak, bound, f"peak in use {size(bound)}")] if len(times) else []
    return Panel(
        y=bytes_axis("in use", height, _CURVE_ROOM),
        height=5.5,
        content=(Stack(times, live[np.newaxis], [_IN_USE]), arena, Line(y=bound, colour=PEAK, dashed=True), *mark),
    )


def rectangles(plan: AddressPlan) -> dict[str, Rectangles]:
    """Return rectangles for all requests, coloured by "phase" and by "layer"; without phases, by "size"."""
    problem, offsets = plan.problem, plan.solution.offsets
    table = problem.buffers
    words = (
        ([f"asked for in {phase_words(phase)}" for phase in problem.phases], table["lower_phase"]),
        ([layer.name for layer in problem.layers], table["lower_layer"]),
    )
    stop = offsets + table["size"]
    groups, of = _by_size(table["size"])
    drawn = Rectangles(table["lower"], table["upper"], offsets, stop, groups, of, problem.ids, _clock(problem), words)
    if not problem.phases:
        return {"size": drawn}
    found = {"phase": by_phase(problem.phases), "layer": by_layer(problem.layers)}
    return {name: replace(drawn, groups=its.groups, of=its.of[table[f"lower_{name}"]]) for name, its in found.items()}


def _clock(problem: Problem) -> str:
    """Return the unit that the axis counts."""
    return "event" if problem.phases else "time"


def _by_size(sizes: np.ndarray) -> tuple[tuple[ColourGroup, ...], np.ndarray]:
    """Return size classes, each larger than the one before by the same factor, and the class of each request."""
    if not len(sizes):
        return (), np.zeros(0, np.int64)
    edges = np.geomspace(sizes.min(), sizes.max() + 1, _SIZE_CLASSES + 1)[1:-1]
    of = np.searchsorted(edges, sizes, "right")
    found = [sizes[of == index] for index in range(_SIZE_CLASSES)]
    labels = [f"{size(int(part.min()))} to {size(int(part.max()))}" if len(part) else "" for part in found]
    return tuple(map(ColourGroup, labels, sequence(_SIZE_CLASSES))), of


def _runs(problem: Problem, what: str, clock: tuple[int, int]) -> Stretches:
    """Return when each phase or layer ran: from its first event until an event of another phase or layer."""
    # A buffer that outlives the step counts as in use for all of it: its times do not say when its phase ran.
    table = problem.buffers[~problem.buffers["outlives"]]
    if (table[f"lower_{what}"] < 0).all():
        return Stretches(*np.zeros((3, 0), np.int64))
    values = np.concatenate([table[f"lower_{what}"], table[f"upper_{what}"]]).astype(np.int64)
    times = np.concatenate([table["lower"], table["upper"]])
    order = np.argsort(times, kind="stable")
    places = np.searchsorted(times[order], np.arange(*clock), "right") - 1
    found = runs(values[order][np.maximum(places, 0)])
    return Stretches(found.start + clock[0], found.end + clock[0], found.value)
