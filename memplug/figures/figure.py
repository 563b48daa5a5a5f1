"""A figure as data, described once: plotly draws it, in a page or as a picture.

If an axis has a unit, numbers along it are in bytes here, and drawn in that unit. Text is plain. `words` are hover
texts, which appear in pages only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from memplug.words import axis_unit

INK, GRID, PEAK = "#333333", "#dddddd", "#b00020"


class Stretches(NamedTuple):
    """Neighbouring half-open stretches [start, end) of the clock, with one value each; int64."""

    start: np.ndarray
    end: np.ndarray
    value: np.ndarray  # index of a phase or of a layer; -1: outside


@dataclass(frozen=True, slots=True)
class ColourGroup:
    """One name and colour for the items that share them."""

    label: str  # in the legend
    colour: str  # "#rrggbb"
    hatched: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """An axis from `low` to `high`; `low` may be the larger number."""

    title: str  # without the unit
    low: float
    high: float
    unit: tuple[str, int] | None = None  # its name, and its size in bytes; None: plain numbers
    ticks: Mapping[int, str] | None = None  # labels of the only ticks, by position; None: plotly chooses ticks
    grid: bool = False  # lines across the panel

    @property
    def scale(self) -> int:
        """Return the divisor that turns a number into its drawn value."""
        return self.unit[1] if self.unit else 1

    @property
    def words(self) -> str:
        """Return the title with the unit."""
        return f"{self.title}, {self.unit[0]}" if self.unit else self.title

    @property
    def drawn(self) -> tuple[float, float]:
        """Return the drawn values of both ends."""
        return self.low / self.scale, self.high / self.scale


def bytes_axis(title: str, most_bytes: float, room: float = 1.0, *, grid: bool = True) -> Axis:
    """Return an axis from 0 to `room` times `most_bytes`, which may be 0."""
    unit = axis_unit(most_bytes)
    return Axis(title=title, low=0, high=room * most_bytes or unit[1], unit=unit, grid=grid)


@dataclass(frozen=True, eq=False, slots=True)
class Stack:
    """Stacked areas, from bottom to top; each level holds until the next x."""

    x: np.ndarray
    levels: np.ndarray  # shape [groups, x]
    groups: Sequence[ColourGroup]


@dataclass(frozen=True, eq=False, slots=True)
class Steps:
    """A line that holds each level until the next x."""

    x: np.ndarray
    y: np.ndarray
    name: str
    words: Sequence[str]  # for each x


@dataclass(frozen=True, eq=False, slots=True)
class Bars:
    """Horizontal bars of one thickness."""

    begin: np.ndarray
    length: np.ndarray
    row: np.ndarray
    colours: Sequence[str]
    words: Sequence[str]
    names: Sequence[str] = ()  # for each bar, drawn where it fits
    thickness: float = 1.0
    group: ColourGroup | None = None  # group of all bars in the legend; None: not in the legend


@dataclass(frozen=True, eq=False, slots=True)
class Rectangles:
    """Requests drawn as address over time; n is their number."""

    lower: np.ndarray  # int64[n] (like `upper`, `start` and `stop`), on the clock
    upper: np.ndarray
    start: np.ndarray  # bytes
    stop: np.ndarray
    groups: Sequence[ColourGroup]
    of: np.ndarray  # int64[n], index into `groups`
    ids: np.ndarray  # int64[n] or text
    clock: str  # unit of `lower` and `upper`, such as "event"
    words: Sequence[tuple[Sequence[str], np.ndarray]]  # texts, and each rectangle's index into them, int64[n]; -1: none


@dataclass(frozen=True, eq=False, slots=True)
class Outlines:
    """White borders of rectangles."""

    boxes: np.ndarray  # int64[n, 4]: lower, upper, start, stop


@dataclass(frozen=True, eq=False, slots=True)
class Spaces:
    """Transparent boxes (lower, upper, start, stop) under one name."""

    boxes: Sequence[tuple[int, int, int, int]]
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A line across the panel: vertical at `x`, or horizontal at `y` with an optional label at one end."""

    x: float | None = None
    y: float | None = None
    colour: str = INK
    dashed: bool = False
    label: str = ""
    label_left: bool = True


@dataclass(frozen=True, slots=True)
class Callout:
    """An arrow to a place, with a text."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One pair of axes; the horizontal axis belongs to the column."""

    y: Axis
    height: float  # relative to the other panels
    content: Sequence[Stack | Steps | Bars | Rectangles | Outlines | Spaces | Line | Callout]
    # Alternative drawings, painted before `content`, by the name of their colouring; a page switches between them.
    views: Mapping[str, Stack | Rectangles] = field(default_factory=dict)
    pictured: int = 1  # number of views in a picture, each in a panel of its own
    title: Sequence[str] = ()  # lines above the panel


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """Panels from top to bottom, over one horizontal axis."""

    x: Axis
    panels: Sequence[Panel]
    width: float = 1.0  # relative to the other columns


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """Columns from left to right."""

    title: str  # also the title of a page's window
    columns: Sequence[Column]
    subtitle: str = ""
    legend: str = ""  # title of the legend for the views' colours
