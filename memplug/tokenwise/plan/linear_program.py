"""A mixed integer linear program (HiGHS) over the seconds and bytes of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import csr_array

from memplug.tokenwise.plan.cost import Linear

NODE_LIMIT = 100
"""Limit of the search nodes of one program. Unlike a time limit, it stops at the same node on every machine."""
GAP = 1e-4
"""Relative distance from the optimum at which the solver stops."""


@dataclass(slots=True)
class LinearProgram:
    """A mixed integer linear program that is built column by column and row by row.

    Attributes:
        unit_s: the unit of time in rows and in the objective, in seconds; chosen to bring their numbers near 1.
        unit_bytes: the unit of memory in rows and in the objective, in bytes; chosen for the same reason.
        cost: coefficient of each column in the objective, which is minimized.
    """

    unit_s: float
    unit_bytes: float
    cost: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    entries: list[tuple[int, int, float]] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)

    def column(self, *, lower: float = 0.0, upper: float = 1.0, integer: bool = False) -> int:
        """Add a column, and return its index."""
        self.cost.append(0.0)
        self.lower.append(lower)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def row(self, terms: Mapping[int, float], at_least: float = 0.0) -> None:
        """Add a row: the sum of coefficient times column is at least `at_least`."""
        self.entries += [(len(self.limits), column, value) for column, value in terms.items()]
        self.limits.append(at_least)

    def largest(self, *pieces_s: Linear) -> Linear:
        """Return a new column that is at least each of `pieces_s`, and equals the largest once it is minimized."""
        return self._largest(pieces_s, self.unit_s)

    def largest_bytes(self, pieces: Sequence[Linear]) -> Linear:
        """Return a new column that is at least 0 and each of `pieces`, and equals the largest once it is minimized."""
        return self._largest(pieces, self.unit_bytes)

    def _largest(self, pieces: Sequence[Linear], unit: float) -> Linear:
        result = Linear(terms={self.column(upper=np.inf): unit})
        for piece in pieces:
            over = (result - piece) / unit
            self.row(over.terms, at_least=-over.constant)
        return result

    def limit(self, nbytes: Linear, at_most: float, margin: float) -> None:
        """Add a row that limits `nbytes` to `at_most` bytes, less `margin` times `unit_bytes`.

        If the constant of `nbytes` alone exceeds the limit, the row limits `nbytes` to that constant.
        """
        left = (Linear(at_most) - nbytes) / self.unit_bytes
        self.row(left.terms, at_least=min(margin - left.constant, 0.0))

    def run(self, *, relaxed: bool = False) -> OptimizeResult:
        """Return the best solution found within `NODE_LIMIT`.

        Args:
            relaxed: let integer columns take fractions.
        """
        rows, columns, values = zip(*self.entries, strict=True)
        matrix = csr_array((values, (rows, columns)), shape=(len(self.limits), len(self.cost)))
        return milp(
            np.array(self.cost),
            integrality=None if relaxed else np.array(self.integer, dtype=int),
            bounds=Bounds(self.lower, self.upper),
            constraints=LinearConstraint(matrix, lb=np.array(self.limits)),
            options={"node_limit": NODE_LIMIT, "mip_rel_gap": GAP},
        )
