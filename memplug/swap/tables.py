"""The tables from which the native core reads a swap list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from memplug.swap.plan.features import RARE
from memplug.swap.plan.part import SwapPart

TARGET = np.dtype(  # SwapTarget in memplug/swap/native/finder.h
    [
        ("nbytes", "<i8"),
        ("dtype", "<i4"),
        ("operator_number", "<i4"),
        ("output", "u1"),
        ("slot", "<i4"),
        ("uses", "<u4"),
        ("kinds", "<u4"),
        ("recent", "<u8"),
        ("tolerance", "<i4"),
        ("last_use", "<i4"),
        ("release", "<i4"),
        ("prefetch", "<i4"),
        ("next_use", "<i4"),
        ("key", "<i4"),
    ]
)
ANCHOR = np.dtype([("place", "<i4"), ("slot", "<i4"), ("key", "<i4")])


@dataclass(frozen=True, slots=True)
class SwapTables:
    """The tables of one list. The native core numbers operators and dtypes anew in each process.

    Attributes:
        program: numbers of the program's outermost operators.
        outside: `SwapPart.outside`, with the numbers of its operators.
        ranks: uint8 by operator number: frequency rank of the operator, see `memplug.swap.plan.features.ranks`.
        targets, anchors: rows of TARGET and ANCHOR.
    """

    program: list[int]
    outside: list[tuple[int, list[int]]]
    ranks: bytes
    targets: bytes
    anchors: bytes

    @classmethod
    def empty(cls) -> SwapTables:
        """Return the tables of an empty list."""
        return cls([], [], b"", b"", b"")


def tables_of(part: SwapPart, core: Any, dtypes: dict[str, int]) -> SwapTables:
    """Return the tables of a plan's swap list.

    Args:
        part: the list.
        core: the native core, which numbers operators.
        dtypes: numbers of dtypes, by their names in traces.
    """
    numbers = core.operator_numbers(list(part.names))
    ranks = np.full(max(numbers, default=0) + 1, RARE, np.uint8)
    ranks[numbers] = part.ranks
    number_of = dict(zip(part.names, numbers, strict=True))
    targets = np.zeros(len(part.targets), TARGET)
    for row, target in zip(targets, part.targets, strict=True):
        row["dtype"], row["operator_number"] = dtypes[target.dtype], number_of.get(target.operator, -1)
        for name in set(TARGET.names) - {"dtype", "operator_number"}:
            row[name] = getattr(target, name)
    program = [numbers[name] for name in part.program]
    outside = [(place, [numbers[name] for name in names]) for place, names in part.outside]
    return SwapTables(
        program, outside, ranks.tobytes(), targets.tobytes(), np.array(list(part.anchors), ANCHOR).tobytes()
    )
