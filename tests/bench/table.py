"""The output of every benchmark: rows for a file, and one table for people."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

MIB = 2**20


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


@dataclasses.dataclass(frozen=True)
class Measured:
    """The figures of one case.

    Attributes:
        case: See `Row`.
        figures: By metric: bytes if its name ends in "_bytes", else a ratio or a count. None: unknown.
        n: Number of measurements behind them.
    """

    case: str
    figures: Mapping[str, float | None]
    n: int


def tabulate(
    bench: str, mode: str, headers: Mapping[str, str], measured: Iterable[Measured], file: Path | None
) -> None:
    """Print a line for each case once it is measured, and then the whole table; bytes are shown in MiB.

    Args:
        bench: See `Row`.
        mode: See `Row`.
        headers: Of the table, by metric, in the order of the columns.
        measured: Measures the next case when it is asked for it.
        file: The file to write the rows to; None: to none.
    """
    rows, lines = [], []
    for one in measured:
        is_bytes = {name: name.endswith("_bytes") for name in headers}
        found = [(name, one.figures[name]) for name in headers]
        rows += [
            Row(bench, one.case, mode, name, "bytes" if is_bytes[name] else "1", value, one.n)
            for name, value in found
            if value is not None
        ]
        shown = [value / MIB if value is not None and is_bytes[name] else value for name, value in found]
        lines.append([one.case, *(figures(value, 3) for value in shown)])
        print(" ".join(lines[-1]), flush=True)
    print(render(["case", *headers.values()], lines, left=0))
    if file is not None:
        write_rows(file, rows)


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
