"""The output of every benchmark: rows for a file, and one table for people."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured number.

    Attributes:
        bench: Name of the benchmark, as in `python -m tests.bench.NAME`.
        case: The work, the same for all modes that are compared.
        mode: The way in which it was run.
        metric: The quantity that was measured.
        unit: Unit of the value ("s", "bytes", "1" for ratios and counts, "text").
        value: The median; a string if the unit is "text".
        n: Number of measurements behind it.
    """

    bench: str
    case: str
    mode: str
    metric: str
    unit: str
    value: float | str
    n: int


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as a JSON list of objects."""
    path.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")


def figures(value: float | None, digits: int = 4) -> str:
    """Return a number with some significant digits, without exponent, whole numbers uncut; "-" for None."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    text = f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def render(headers: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a Markdown table that also lines up in a terminal.

    Args:
        headers: One for each column.
        lines: The cells.
        left: Index of the column that is aligned to the left (names); all others are numbers.
    """
    widths = [max(len(line[i]) for line in [headers, *lines]) for i in range(len(headers))]

    def cells(line: Sequence[str]) -> str:
        sized = enumerate(zip(line, widths, strict=True))
        padded = [cell.ljust(width) if i == left else cell.rjust(width) for i, (cell, width) in sized]
        return f"| {' | '.join(padded)} |"

    rule = [f"{'-' * (width + 1)}:" if i != left else f":{'-' * (width + 1)}" for i, width in enumerate(widths)]
    return "\n".join([cells(headers), f"|{'|'.join(rule)}|", *map(cells, lines)])
