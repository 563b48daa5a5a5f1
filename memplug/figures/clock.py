"""Finds the stretches of phases and layers on a clock, draws them as bars, and thins out a curve of memory in use.

A clock is the horizontal axis of a recording: it counts operators or memory events. A stretch is an interval on the
clock in which one phase or one layer runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memplug.figures.figure import Axis, Bars, Panel, Stretches
from memplug.figures.groups import by_phase, phase_letters, phase_words, sequence, short_names
from memplug.profile.records import Layer, Phase


def strips(
    phases: Sequence[Phase], layers: Sequence[Layer], phase_runs: Stretches, layer_runs: Stretches, clock: str
) -> list[Panel]:
    """Return a panel with the phases that ran and one with the layers; leave out a panel without stretches.

    Args:
        phases: The table that `phase_runs` refers to.
        layers: The table that `layer_runs` refers to.
        phase_runs: Stretches of phases.
        layer_runs: Stretches of layers.
        clock: The clock's unit, such as "operator".
    """
    groups, short = by_phase(phases), short_names(layers)
    # For each phase or layer: its colour, its hover text and its name.
    phase_looks = [
        (groups.groups[group].colour, phase_words(phase), phase_letters(phase))
        for phase, group in zip(phases, groups.of[:-1], strict=True)
    ]
    layer_looks = [
        (colour, layer.name + (" (dynamic)" if layer.dynamic else ""), name)
        for colour, layer, name in zip(sequence(len(short)), layers, short, strict=True)
    ]
    return [
        Panel(y=Axis(title="", low=-0.5, high=0.5, ticks={0: what}), height=1, content=(_strip(clock, runs, looks),))
        for what, runs, looks in (("phase", phase_runs, phase_looks), ("layer", layer_runs, layer_looks))
        if len(runs.value)
    ]


def _strip(clock: str, runs: Stretches, looks: list[tuple[str, str, str]]) -> Bars:
    start, end, value = (column[runs.value >= 0] for column in runs)
    rows = [(*looks[value], a, b) for a, b, value in zip(start, end, value.tolist(), strict=True)]
    return Bars(
        begin=start,
        length=end - start,
        row=np.zeros(len(rows)),
        colours=[colour for colour, *_ in rows],
        words=[f"{words}: from {clock} {a:,} up to {b:,}" for _, words, _, a, b in rows],
        names=[name for _, _, name, *_ in rows],
    )


def runs(values: np.ndarray, at_most: int = 2000) -> Stretches:
    """Return the stretches of equal values.

    If there are more than `at_most`, sample `at_most` evenly spaced values, and return the stretches of equal samples.
    """
    bounds = np.arange(len(values) + 1)
    if len(_edges(values)) > at_most:
        cells = np.linspace(0, len(values), at_most + 1)
        bounds, values = cells.astype(np.int64), values[((cells[:-1] + cells[1:]) / 2).astype(np.int64)]
    edges = _edges(values)
    ends = np.append(edges, len(values))[1:]
    return Stretches(bounds[edges], bounds[ends], values[edges].astype(np.int64))


def layer_runs(rows: np.ndarray, at_most: int = 2000) -> Stretches:
    """Return the stretches of layers in a table of operators or events, like `runs`; each new phase begins one too."""
    layers = int(rows["layer"].max(initial=-1)) + 2
    found = runs(rows["phase"].astype(np.int64) * layers + rows["layer"] + 1, at_most)
    return found._replace(value=found.value % layers - 1)


def _edges(values: np.ndarray) -> np.ndarray:
    """Return where each stretch of equal values begins."""
    return np.flatnonzero(np.diff(values, prepend=values[:1] - 1))


def m4(in_use: np.ndarray, places: np.ndarray, length: int, bins: int) -> np.ndarray:
    """Return the indices of the first, smallest, largest and last value in each part of the clock, to draw a curve.

    Args:
        in_use: Memory in use after each event.
        places: Position of each event on the clock, in increasing order.
        length: Length of the clock.
        bins: Number of equal parts of the clock.

    Returns:
        int64[at most 4 * bins], in increasing order.
    """
    kept = set()
    bounds = np.searchsorted(places, np.linspace(0, length, bins + 1)[1:-1], "left")
    for begin, end in zip([0, *bounds], [*bounds, len(in_use)], strict=True):
        if begin < end:
            part = in_use[begin:end]
            kept |= {int(begin), int(begin + part.argmin()), int(begin + part.argmax()), int(end - 1)}
    return np.array(sorted(kept), np.int64)
