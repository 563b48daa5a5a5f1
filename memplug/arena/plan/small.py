"""A layout problem in the form that exact planners use."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplug.arena.plan.intervals import sections
from memplug.arena.plan.problem import Problem


@dataclass(frozen=True, slots=True)
class Small:
    """A problem on sections of time, in units of the sizes' common divisor.

    Attributes:
        lower, upper: int32[n], see `intervals.sections`.
        size, alignment: int64[n], units.
        unit: bytes.
    """

    lower: np.ndarray
    upper: np.ndarray
    size: np.ndarray
    alignment: np.ndarray
    unit: int

    @staticmethod
    def of(problem: Problem) -> Small:
        """Return `problem` with times as sections and bytes in units."""
        table = problem.buffers
        lower, upper = sections(table)
        aligned = table["alignment"][table["alignment"] > 1]
        unit = int(np.gcd.reduce(np.concatenate([table["size"], aligned]), initial=0)) or 1
        alignment = np.maximum(table["alignment"] // unit, 1)
        return Small(lower, upper, table["size"] // unit, alignment, unit)
