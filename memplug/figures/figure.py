"""A figure as data, described once: plotly draws it, in a page or as a picture.

Numbers along an axis with a unit are bytes here, and drawn in that unit. Text is plain, and words that lie under the
pointer are in pages alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from memplug.words import axis_unit

INK, GRID, PEAK = "#333333", "#dddddd", "#b00020"


class Runs(NamedTuple):
    """Neighbouring half-open stretches [start, end) of the clock, with one value each; int64."""

    start: np.ndarray
    end: np.ndarray
    value: np.ndarray  # an index of a phase or of a layer; -1: outside


@dataclass(frozen=True, slots=True)
class Group:
    """What has one colour, under one name."""

    label: str  # for the legend
    colour: str  # "#rrggbb"
    hatched: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """From one end to the other, of which `low` may be the larger."""

    title: str  # without the unit
    low: float
    high: float
    unit: tuple[str, int] | None = None  # its name, and its bytes; None: plain numbers
    ticks: Mapping[int, str] | None = None  # the only places with a name, if given
    grid: bool = False  # lines across the panel

    @property
    def scale(self) -> int:
        """What a number is divided by to be drawn."""
        return self.unit[1] if self.unit else 1

    @property
    def words(self) -> str:
        """The title with the unit."""
        return f"{self.title}, {self.unit[0]}" if self.unit else self.title

    @property
    def drawn(self) -> tuple[float, float]:
        """Both ends."""
        return self.low / self.scale, self.high / self.scale


def bytes_axis(title: str, most_bytes: float, room: float = 1.0, *, grid: bool = True) -> Axis:
    """From 0 to `room` times the largest amount, which may be 0."""
    unit = axis_unit(most_bytes)
    return Axis(title=title, low=0, high=room * most_bytes or unit[1], unit=unit, grid=grid)


@dataclass(frozen=True, eq=False, slots=True)
class Stack:
    """Areas upon each other, from the bottom up; each level holds until the next place."""

    x: np.ndarray
    levels: np.ndarray  # [groups, places]
    groups: Sequence[Group]


@dataclass(frozen=True, eq=False, slots=True)
class Steps:
    """A line that holds each level until the next place."""

    x: np.ndarray
    y: np.ndarray
    name: str
    words: Sequence[str]  # of each place


@dataclass(frozen=True, eq=False, slots=True)
class Bars:
    """Bars along the level axis, of one thickness."""

    begin: np.ndarray
    length: np.ndarray
    row: np.ndarray
    colours: Sequence[str]
    words: Sequence[str]
    names: Sequence[str] = ()  # of each bar, drawn where it fits
    thickness: float = 1.0
    group: Group | None = None  # that all are of, where there is a legend


@dataclass(frozen=True, eq=False, slots=True)
class Rectangles:
    """Requests as address times time."""

    lower: np.ndarray  # int64[n], like the next three; on the clock
    upper: np.ndarray
    start: np.ndarray  # bytes
    stop: np.ndarray
    groups: Sequence[Group]
    of: np.ndarray  # int64[n], into `groups`
    ids: np.ndarray  # int64[n] or text
    clock: str  # what `lower` and `upper` count, such as "event"
    words: Sequence[tuple[Sequence[str], np.ndarray]]  # tables of text, with the entry of each request; -1: none


@dataclass(frozen=True, eq=False, slots=True)
class Outlines:
    """White borders of rectangles."""

    boxes: np.ndarray  # int64[n, 4]: lower, upper, start, stop


@dataclass(frozen=True, eq=False, slots=True)
class Spaces:
    """Boxes (lower, upper, start, stop) under one name, through which the rest shows."""

    boxes: Sequence[tuple[int, int, int, int]]
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Across the panel, upright at a place `x` or level at an amount `y`; a level one may have a label at one end."""

    x: float | None = None
    y: float | None = None
    colour: str = INK
    dashed: bool = False
    label: str = ""
    label_left: bool = True


@dataclass(frozen=True, slots=True)
class Mark:
    """A place pointed to, with what there is to say about it."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One pair of axes; the level one is the column's."""

    y: Axis
    height: float  # relative to the other panels
    content: Sequence[Stack | Steps | Bars | Rectangles | Outlines | Spaces | Line | Mark]
    # What else may be drawn, below that, by what it is coloured by: a page switches between the views.
    views: Mapping[str, Stack | Rectangles] = field(default_factory=dict)
    pictured: int = 1  # of these views, which a picture has in a panel each
    title: Sequence[str] = ()  # lines above it


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """Panels from the top down, over one level axis."""

    x: Axis
    panels: Sequence[Panel]
    width: float = 1.0  # relative to the other columns


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """Columns from the left."""

    title: str  # of a page's window too
    columns: Sequence[Column]
    subtitle: str = ""
    legend: str = ""  # title of what names the colours of views
