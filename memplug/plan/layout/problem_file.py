"""Layout problems as CSV, in the format of google/minimalloc: a row for each buffer; solved, with its offset.

The header names the columns, in any order: `id` (or `buffer`, `buffer_id`), `lower` (or `start`, `begin`), `upper`
exclusive (or `end`, inclusive), `size`, and `alignment` where there is any. `gaps` are not supported, other columns
mean nothing here. Blank lines are none. A million rows are read in seconds: by column, and once more by line to find
out which one is at fault.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TextIO

import numpy as np

from memplug.errors import LayoutError
from memplug.files import opened, write_whole
from memplug.plan.layout.problem import Problem, Solution, buffers

_ALIASES = {"buffer": "id", "buffer_id": "id", "start": "lower", "begin": "lower", "end": "upper"}
_REQUIRED = ("id", "lower", "upper", "size")
_NUMBERS = ("lower", "upper", "size", "alignment")
_ADVICE = (
    "The first line names the columns, for example id,lower,upper,size; each other line is one buffer, in integers."
)
_LAST = np.iinfo(np.int64).max


class _Columns:
    """Where a header has which column.

    Attributes:
        count: of all columns.
        at: index of each column that is of use, by its name in this module.
        inclusive: 1 where the file gives the last instant of a lifetime, 0 where it gives the one after.
    """

    def __init__(self, names: list[str]) -> None:
        names = [name.strip() for name in names]
        renamed = [_ALIASES.get(name, name) for name in names]
        missing = [name for name in _REQUIRED if name not in renamed]
        if missing:
            raise ValueError(f"the header has no column {', '.join(missing)}: it is {_shown(','.join(names))}")
        twice = [name for name in (*_NUMBERS, "id", "gaps") if renamed.count(name) > 1]
        if twice:
            raise ValueError(f"the header has more than one column for {', '.join(twice)}")
        self.count = len(names)
        self.at = {name: renamed.index(name) for name in (*_REQUIRED, "alignment", "gaps") if name in renamed}
        self.inclusive = int("end" in names)


def read_csv(path: str | Path) -> Problem:
    """Reads a problem; its ids are int64 where all are numbers as Python would write them, else str.

    Args:
        path: Of the file: UTF-8.

    Raises:
        LayoutError: The file is unreadable, is none of this format, or has a line that is no buffer; with its number.
    """
    path = Path(path)
    with (
        opened(path, "problem (.csv)", LayoutError) as file,
        io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text,
    ):
        try:
            return _read(text)
        except LayoutError as error:
            raise LayoutError(f"{path}: {error.problem}", error.advice) from error
        except (csv.Error, ValueError, OverflowError) as error:
            fault = _first_fault(text) or f"not a problem that can be read: {error}"
            raise LayoutError(f"{path}: {fault}", _ADVICE) from error


def write_csv(problem: Problem, solution: Solution, path: str | Path) -> None:
    """Writes the problem's rows, in their order, with the offsets that were found; the whole file or nothing.

    Args:
        problem: Any; streams, phases and layers have no place in the format. Alignments are written if one is not 1.
        solution: Of the problem.
        path: A file in a folder that exists; by convention *.csv.

    Raises:
        LayoutError: The file cannot be written there.
    """
    table = problem.buffers
    numbers = [name for name in _NUMBERS if name != "alignment" or (table["alignment"] != 1).any()]
    columns = [problem.ids, *(table[name] for name in numbers), solution.offsets]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["id", *numbers, "offset"])
    writer.writerows(zip(*(column.tolist() for column in columns), strict=True))
    write_whole(Path(path), "solution", lambda file: file.write(text.getvalue().encode()), LayoutError)


def _read(text: TextIO) -> Problem:
    rows = list(filter(None, csv.reader(text)))
    if not rows:
        raise LayoutError("an empty file", _ADVICE)
    columns = _Columns(rows[0])
    if set(map(len, rows)) != {columns.count}:
        raise ValueError("lines of different lengths")
    del rows[0]
    if "gaps" in columns.at and any(row[columns.at["gaps"]].strip() for row in rows):
        raise ValueError("gaps")
    table = buffers(np.zeros((len(rows), 3), np.int64))
    for name in _NUMBERS:
        if name in columns.at:
            column = columns.at[name]
            table[name] = np.fromiter((int(row[column]) for row in rows), np.int64, len(rows))
    if (table["upper"] > _LAST - columns.inclusive).any():
        raise OverflowError("an end beyond int64")
    table["upper"] += columns.inclusive
    ids = [row[columns.at["id"]].strip() for row in rows]
    if len(set(ids)) < len(ids):
        raise ValueError("an id twice")
    if "" in ids:
        raise ValueError("no id")
    if any((table[name] <= 0).any() for name in ("size", "alignment")) or (table["upper"] <= table["lower"]).any():
        raise ValueError("a buffer of no size, or in use for no time")
    return Problem(buffers=table, ids=_ids(ids))


def _ids(written: list[str]) -> np.ndarray:
    """int64 if that loses nothing, else str: "007" and "7" are two ids."""
    try:
        numbers = np.fromiter(map(int, written), np.int64, len(written))
    except (ValueError, OverflowError):
        return np.array(written, np.str_)
    return numbers if list(map(str, numbers.tolist())) == written else np.array(written, np.str_)


def _first_fault(text: TextIO) -> str | None:
    """The first line at fault, with its number, from 1, and what is wrong with it; None: none is, taken by itself."""
    text.seek(0)
    reader = csv.reader(text)
    columns, seen, line = None, {}, 1
    try:
        for fields in reader:
            if fields and columns is None:
                columns = _Columns(fields)
            elif fields:
                fault = _fault(fields, columns, seen, line)
                if fault:
                    return f"line {line}: {fault}"
            line = reader.line_num + 1  # where the next row begins: a quoted field may go over several lines
    except UnicodeDecodeError as error:
        return f"line {line} or later: not text in UTF-8: {error.reason}"
    except (csv.Error, ValueError) as error:
        return f"line {line}: {error}"
    return None


def _fault(fields: list[str], columns: _Columns, seen: dict[str, int], line: int) -> str | None:
    if len(fields) != columns.count:
        return f"{len(fields)} fields where the header has {columns.count}: {_shown(','.join(fields))}"
    if "gaps" in columns.at and fields[columns.at["gaps"]].strip():
        return f"gaps {_shown(fields[columns.at['gaps']])}: a buffer is in use for all of its lifetime here"
    values = {"alignment": 1}
    for name in _NUMBERS:
        if name not in columns.at:
            continue
        written = fields[columns.at[name]].strip()
        try:
            values[name] = int(written) + (columns.inclusive if name == "upper" else 0)
        except ValueError:
            return f"{name} is {_shown(written)}, not an integer"
        if not -_LAST - 1 <= values[name] <= _LAST:
            return f"{name} is {_shown(written)}, which no int64 holds"
    for name in ("size", "alignment"):
        if values[name] <= 0:
            return f"{name} is {values[name]}, not above 0"
    if values["upper"] <= values["lower"]:
        return f"in use from {values['lower']} up to {values['upper']}: no time at all"
    name = fields[columns.at["id"]].strip()
    if not name:
        return "no id"
    first = seen.setdefault(name, line)
    return f"the id {_shown(name)} of line {first} once more" if first != line else None


def _shown(written: str) -> str:
    return repr(written if len(written) <= 60 else f"{written[:57]}...")
