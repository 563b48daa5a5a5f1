"""Reads and writes layout problems as CSV, in the format of google/minimalloc: one row per buffer.

The header names the columns, in any order: `id` (or `buffer`, `buffer_id`), `lower` (or `start`, `begin`), `upper`
exclusive (or `end`, inclusive), `size`, and optionally `alignment`. A value in the column `gaps` is an error; other
columns and blank lines are ignored. A solved problem has a column `offset` too. Reading a million rows takes seconds.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TextIO

import numpy as np

from memplug.arena.plan.problem import Problem, Solution, buffers
from memplug.errors import LayoutError
from memplug.files import opened, path_of, write_whole

_ALIASES = {"buffer": "id", "buffer_id": "id", "start": "lower", "begin": "lower", "end": "upper"}
_REQUIRED = ("id", "lower", "upper", "size")
_NUMBERS = ("lower", "upper", "size", "alignment")
_ADVICE = (
    "The first line names the columns, for example id,lower,upper,size; each other line is one buffer, in integers."
)
_LAST = np.iinfo(np.int64).max


class _Header:
    """The columns of a file.

    Args:
        names: names of all columns.

    Raises:
        ValueError: a column is missing, or named twice.
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
        self._count = len(names)
        self._at = {name: renamed.index(name) for name in (*_REQUIRED, "alignment", "gaps") if name in renamed}
        self._inclusive = int("end" in names)  # the file gives the last instant of a lifetime, not the one after

    def row(self, fields: list[str]) -> tuple[str, tuple[int, ...]]:
        """Return a buffer's id, and its numbers in the order of `_NUMBERS`.

        Raises:
            ValueError: the fields describe no buffer.
        """
        if len(fields) != self._count:
            raise ValueError(f"{len(fields)} fields where the header has {self._count}: {_shown(','.join(fields))}")
        if "gaps" in self._at and (gaps := fields[self._at["gaps"]].strip()):
            raise ValueError(
                f"gaps {_shown(gaps)}: a buffer occupies its memory during its whole lifetime; leave the column empty"
            )
        values = tuple(self._number(name, fields) for name in _NUMBERS)
        lower, upper, size, alignment = values
        for name, value in (("size", size), ("alignment", alignment)):
            if value <= 0:
                raise ValueError(f"{name} is {value}, not above 0")
        if upper <= lower:
            raise ValueError(f"in use from {lower} up to {upper}: no time at all")
        name = fields[self._at["id"]].strip()
        if not name:
            raise ValueError("no id")
        return name, values

    def _number(self, name: str, fields: list[str]) -> int:
        if name not in self._at:
            return 1  # only the alignment may be missing
        written = fields[self._at[name]].strip()
        try:
            value = int(written) + (self._inclusive if name == "upper" else 0)
        except ValueError:
            raise ValueError(f"{name} is {_shown(written)}, not an integer") from None
        if not -_LAST - 1 <= value <= _LAST:
            raise ValueError(f"{name} is {_shown(written)}, which no int64 holds")
        return value


def read_csv(path: str | Path) -> Problem:
    """Read a problem; its ids are int64, or str if integers would lose something, as they would for "007".

    Args:
        path: a file in UTF-8.

    Raises:
        LayoutError: the file is unreadable, has another format, or has a line that is no buffer; names the line.
    """
    path = path_of(path, "problem (.csv)", LayoutError)
    with (
        opened(path, "problem (.csv)", LayoutError) as file,
        io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text,
    ):
        try:
            return _read(text)
        except LayoutError as error:
            raise LayoutError(f"{path}: {error.problem}", error.advice) from error


def write_csv(problem: Problem, solution: Solution, path: str | Path) -> None:
    """Write the problem's rows in order, with the offsets of a solution; the whole file or nothing.

    Args:
        problem: any layout problem; the format has no place for streams, phases and layers. Alignments are written if
            one is not 1.
        solution: of the problem.
        path: a file in a folder that exists; by convention *.csv.

    Raises:
        LayoutError: the file cannot be written there.
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
    reader = csv.reader(text)
    header, rows, line = None, [], 1
    seen: dict[str, int] = {}  # the line of each id
    try:
        for fields in reader:
            if fields and header is None:
                header = _Header(fields)
            elif fields:
                name, row = header.row(fields)
                if name in seen:
                    raise ValueError(f"the id {_shown(name)} is already on line {seen[name]}")
                seen[name] = line
                rows.append(row)
            line = reader.line_num + 1  # where the next row begins: a quoted field may span several lines
    except UnicodeDecodeError as error:
        raise LayoutError(f"at line {line} or later: not text in UTF-8: {error.reason}", _ADVICE) from error
    except (csv.Error, ValueError) as error:
        raise LayoutError(f"at line {line}: {error}", _ADVICE) from error
    if header is None:
        raise LayoutError("an empty file", _ADVICE)
    table = buffers(np.zeros((len(rows), 3), np.int64))
    for name, column in zip(_NUMBERS, zip(*rows, strict=True), strict=bool(rows)):
        table[name] = column
    return Problem(buffers=table, ids=_ids(list(seen)))


def _ids(written: list[str]) -> np.ndarray:
    """Return ids as int64, or as str if integers would lose something: "007" and "7" are two ids."""
    try:
        numbers = np.fromiter(map(int, written), np.int64, len(written))
    except (ValueError, OverflowError):
        return np.array(written, np.str_)
    return numbers if list(map(str, numbers.tolist())) == written else np.array(written, np.str_)


def _shown(written: str) -> str:
    return repr(written if len(written) <= 60 else f"{written[:57]}...")
