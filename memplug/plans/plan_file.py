"""Plans as files: one JSON object, written whole or not at all, refused with a reason when it was changed.

Its first line has the format and a digest of all that follows. Then comes what a person reads: planner, heights,
predictions, fingerprint, decisions, phases, layers and dynamic spaces; and then the table of the requests, one line a
column.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from memplug.arena.plan.part import DynamicSpace, Predictions
from memplug.arena.plan.problem import BUFFER, ORDERING, Problem, Solution
from memplug.errors import LayoutError
from memplug.files import opened, path_of, write_whole
from memplug.plans.schema import FORMAT, MemoryPlan, Training
from memplug.profile.records import Fingerprint, Layer, Pass, Phase

_FIRST_LINE = re.compile(rb'\{"memplug_plan": ([0-9]{1,9}), "sha256": "([0-9a-f]{64})",\n')
_BEGINNING = re.compile(rb'\s*\{\s*"memplug_plan"\s*:')
_BEGINNING_BYTES = 200
_DAMAGED = "Make the plan again with `memplug plan`, or copy it again from where it was made; a plan is not edited."
_ANOTHER = "Give the path of a plan that `memplug plan` has written (.json)."
_PLACES = ("lower_phase", "upper_phase", "lower_layer", "upper_layer")


class _Phase(BaseModel):
    """A `Phase`, with its kind by name."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    kind: str
    micro_batch: int


class _Head(BaseModel):
    """All of a plan but its tables."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    planner: str
    optimal: bool
    timed_out: bool
    seconds: float
    height_bytes: int = Field(ge=0, lt=2**62)
    requests: int = Field(ge=0)
    predictions: Predictions
    fingerprint: Fingerprint
    training: Training | None
    phases: tuple[_Phase, ...]
    layers: tuple[Layer, ...]
    dynamic: tuple[DynamicSpace, ...]
    parts: dict[str, Any]


def save(plan: MemoryPlan, path: str | Path) -> None:
    """Writes a plan; the file at `path` is the old one or the whole new one at any moment. Equal plans, equal files.

    Args:
        plan: One that has an offset for each of its buffers.
        path: A file in a folder that exists; by convention *.json.

    Raises:
        LayoutError: The file cannot be written there.
    """
    content = ",\n".join(_members(plan)).encode() + b"\n}\n"
    first = f'{{"memplug_plan": {FORMAT}, "sha256": "{hashlib.sha256(content).hexdigest()}",\n'.encode()

    def write(file: BinaryIO) -> None:
        file.write(first)
        file.write(content)

    write_whole(path_of(path, "plan (.json)", LayoutError), "plan", write, LayoutError)


def load(path: str | Path) -> MemoryPlan:
    """Reads what `save` wrote. Whether it is a good plan, and one of this run, the judge says.

    Args:
        path: Of the file.

    Returns:
        The very plan that was saved.

    Raises:
        LayoutError: There is no such file, it is something else, it was changed or cut short, or it was written by
            another version of memplug.
    """
    path = path_of(path, "memory plan (.json)", LayoutError)
    with opened(path, "memory plan (.json)", LayoutError) as file:
        try:
            return _plan(_document(file))
        except LayoutError as error:
            advice = _DAMAGED if error.advice == LayoutError.default_advice else error.advice
            raise LayoutError(f"{path}: {error.problem}", advice) from error
        except Exception as error:
            # The digest is right, and may have been made so: the fields may hold anything.
            reason = f"{type(error).__name__}: {error}"
            raise LayoutError(f"{path}: not a plan that memplug has written: {reason}", _DAMAGED) from error


def is_plan(path: str | Path) -> bool:
    """Whether a file begins as a plan does, which a look at its first bytes says; False: it cannot be read, too."""
    path = Path(path)
    try:
        # A pipe might never end.
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return bool(_BEGINNING.match(file.read(_BEGINNING_BYTES)))
    except OSError:
        return False


def _members(plan: MemoryPlan) -> Iterator[str]:
    """Each member of the JSON object but the first two, as text."""
    problem, solution = plan.problem, plan.solution
    assert solution.offsets.dtype == np.int64 and len(solution.offsets) == len(problem), "an offset for each buffer"
    members = {
        "planner": solution.planner,
        "optimal": bool(solution.optimal),
        "timed_out": bool(solution.timed_out),
        "seconds": float(solution.seconds),
        "height_bytes": int(solution.height),
        "requests": len(problem),
        "predictions": asdict(plan.predictions),
        "fingerprint": asdict(problem.fingerprint),
        "parts": plan.parts,
    }
    yield from (f'"{name}": {_json(value)}' for name, value in members.items())
    yield from _training(plan.training)
    lists = {
        "phases": [{"kind": phase.kind.name.lower(), "micro_batch": phase.micro_batch} for phase in problem.phases],
        "layers": [asdict(layer) for layer in problem.layers],
        "dynamic": [asdict(group) for group in plan.dynamic],
    }
    for name, rows in lists.items():
        yield f'"{name}": [{_lines(map(_json, rows), "  ")}]'
    columns = {"id": problem.ids, "offset": solution.offsets, **{name: problem.buffers[name] for name in BUFFER.names}}
    orderings = {name: problem.orderings[name] for name in ORDERING.names}
    for table, its_columns in (("buffers", columns), ("orderings", orderings)):
        lines = (f'"{name}": {_column_text(values)}' for name, values in its_columns.items())
        yield f'"{table}": {{{_lines(lines)}}}'


def _training(training: Training | None) -> Iterator[str]:
    """The members that say what a run goes on from; null where it is none, or nothing was decided."""
    parts = asdict(training) if training is not None else {"decisions": None}
    decisions = parts.pop("decisions") or {"settings": {}}
    settings = decisions.pop("settings")
    yield f'"training": {_json(parts or None)}'
    yield f'"decisions": {_json(decisions or None)}'
    yield f'"regions": {{{_lines((f"{_json(name)}: {_json(setting)}" for name, setting in settings.items()), "  ")}}}'


def _lines(parts: Iterable[str], indent: str = "") -> str:
    joined = f",\n{indent}".join(parts)
    return f"\n{indent}{joined}\n" if joined else ""


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, default=_plain)


def _plain(value: Any) -> Any:
    """Planners compute with numpy, whose numbers are as good; sets are lists in JSON."""
    return sorted(value) if isinstance(value, frozenset) else value.item()


def _column_text(column: np.ndarray) -> str:
    values = column.astype(np.int8) if column.dtype == np.bool_ else column
    return json.dumps(values.tolist(), separators=(",", ":"))


def _document(file: BinaryIO) -> dict[str, Any]:
    first = file.readline(_BEGINNING_BYTES)
    match = _FIRST_LINE.fullmatch(first)
    if not match:
        if not _BEGINNING.match(first + file.read(_BEGINNING_BYTES)):
            raise LayoutError("not a plan of memplug", _ANOTHER)
        raise LayoutError("the contents are not what was saved")
    version = int(match[1])
    if version != FORMAT:
        raise LayoutError(
            f"a plan of format {version}, and this memplug reads format {FORMAT}",
            "Install the memplug that made it or a newer one, or make it again with this one: `memplug plan`.",
        )
    content = file.read()
    if hashlib.sha256(content).hexdigest().encode() != match[2]:
        raise LayoutError("the contents are not what was saved: changed, or cut short")
    return json.loads(b"{" + content)


def _plan(document: dict[str, Any]) -> MemoryPlan:
    buffers, orderings = document.pop("buffers"), document.pop("orderings")
    decisions, regions = document.pop("decisions"), document.pop("regions")
    if document["training"] is not None:
        document["training"]["decisions"] = decisions and {**decisions, "settings": regions}
    head = _Head.model_validate_json(json.dumps(document))
    problem = Problem(
        buffers=_table(buffers, BUFFER, head.requests),
        ids=_ids(buffers["id"], head.requests),
        orderings=_table(orderings, ORDERING, len(orderings["time"])),
        phases=tuple(Phase(Pass[phase.kind.upper()], phase.micro_batch) for phase in head.phases),
        layers=head.layers,
        fingerprint=head.fingerprint,
    )
    for name in _PLACES:
        values = problem.buffers[name]
        if (values < -1).any() or (values >= len(head.phases if name.endswith("phase") else head.layers)).any():
            raise ValueError(f"{name} has places that there are none of")
    solution = Solution(
        offsets=_column(buffers, "offset", np.dtype(np.int64), head.requests),
        height=head.height_bytes,
        planner=head.planner,
        optimal=head.optimal,
        seconds=head.seconds,
        timed_out=head.timed_out,
    )
    return MemoryPlan(
        problem=problem,
        solution=solution,
        dynamic=head.dynamic,
        predictions=head.predictions,
        training=head.training,
        parts=head.parts,
    )


def _table(columns: dict[str, Any], dtype: np.dtype, rows: int) -> np.ndarray:
    table = np.empty(rows, dtype)
    for name in dtype.names:
        table[name] = _column(columns, name, dtype[name], rows)
    return table


def _column(columns: dict[str, Any], name: str, dtype: np.dtype, rows: int) -> np.ndarray:
    values = columns[name]
    if not isinstance(values, list) or len(values) != rows or not set(map(type, values)) <= {int}:
        raise ValueError(f"the column {name} is not {rows} integers")
    array = np.array(values, np.int64)
    bounds = (0, 1) if dtype == np.bool_ else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if rows and not (bounds[0] <= array.min() and array.max() <= bounds[1]):
        raise ValueError(f"the column {name} has values that are not of type {dtype}")
    return array.astype(dtype)


def _ids(values: Any, rows: int) -> np.ndarray:
    if not isinstance(values, list) or len(values) != rows:
        raise ValueError(f"the column id is not {rows} ids")
    kinds = set(map(type, values))
    if kinds == {str}:
        return np.array(values, np.str_)
    return _column({"id": values}, "id", np.dtype(np.int64), rows)
