"""Checks that a trace is well formed: dtypes, indices, sizes, steps, one malloc and at most one free per request."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from memplug.errors import TraceError
from memplug.profile.records import OPERATOR, REQUEST_EVENT, TENSOR, USE, EventKind, Fingerprint, Layer, Phase

_ARRAYS = {"operators": OPERATOR, "uses": USE, "tensors": TENSOR, "events": REQUEST_EVENT}
_TABLES = {"names": str, "dtypes": str, "phases": Phase, "layers": Layer}


class TraceTables(Protocol):
    """The fields of `memplug.profile.trace.Trace`; see there."""

    fingerprint: Fingerprint
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    phases: tuple[Phase, ...]
    layers: tuple[Layer, ...]
    operators: np.ndarray
    uses: np.ndarray
    tensors: np.ndarray
    events: np.ndarray
    steps: tuple[tuple[int, int, float], ...]
    base_bytes: int
    peak_bytes: int


def check(trace: TraceTables) -> None:
    """Raise an error unless the trace is well formed.

    Raises:
        TraceError: an array, row or value is wrong; the message names the first one.
    """
    # each check relies on the checks before it
    for problems in (_types, _indices, _sizes, _requests, _steps):
        for problem in problems(trace):
            raise TraceError(f"not a well-formed trace: {problem}")


def _types(trace: TraceTables) -> Iterator[str]:
    for name, dtype in _ARRAYS.items():
        array = getattr(trace, name)
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
            yield f"`{name}` is not an array of one dimension with the columns {', '.join(dtype.names)} of {dtype}"
    for name, kind in _TABLES.items():
        table = getattr(trace, name)
        if not isinstance(table, tuple) or not all(isinstance(entry, kind) for entry in table):
            yield f"`{name}` is not a tuple of {kind.__name__}"
        elif kind is str and len(set(table)) < len(table):
            yield f"`{name}` holds a name twice"
    if not isinstance(trace.fingerprint, Fingerprint):
        yield "`fingerprint` is not a Fingerprint"
    for name in ("base_bytes", "peak_bytes"):
        nbytes = getattr(trace, name)
        if not isinstance(nbytes, int) or nbytes < 0:
            yield f"`{name}` is {nbytes!r}, not a number of bytes"


def _indices(trace: TraceTables) -> Iterator[str]:
    operators, events = len(trace.operators), trace.events
    mallocs = int((events["kind"] == EventKind.MALLOC).sum())
    bounds = (
        ("operators", "name", 0, len(trace.names)),
        ("operators", "phase", 0, len(trace.phases)),
        ("operators", "layer", -1, len(trace.layers)),
        ("operators", "depth", -2, 1 << 15),
        ("uses", "operator", 0, operators),
        ("uses", "tensor", 0, len(trace.tensors)),
        ("tensors", "dtype", 0, len(trace.dtypes)),
        ("events", "kind", 0, len(EventKind)),
        ("events", "request", -1, mallocs),
        ("events", "operator", -1, operators),
        ("events", "phase", 0, len(trace.phases)),
        ("events", "layer", -1, len(trace.layers)),
    )
    for array, column, low, high in bounds:
        values = getattr(trace, array)[column]
        if (outside := _first((values < low) | (values >= high))) is not None:
            yield f"{array}[{outside}].{column} is {values[outside]}, outside of [{low}, {high})"
    if (backwards := _first(np.diff(trace.uses["operator"]) < 0)) is not None:
        yield f"uses[{backwards + 1}].operator is lower than the one before: uses are in the order of operators"


def _sizes(trace: TraceTables) -> Iterator[str]:
    columns = (
        ("operators", "time_ns"),
        ("operators", "in_use_bytes"),
        ("tensors", "nbytes"),
        ("events", "nbytes"),
        ("events", "stream"),
        ("events", "thread"),
    )
    for array, column in columns:
        values = getattr(trace, array)[column]
        if (negative := _first(values < 0)) is not None:
            yield f"{array}[{negative}].{column} is {values[negative]}, below 0"
    # other code sums sizes in int64
    if trace.base_bytes + float(trace.events["nbytes"].sum(dtype=np.float64)) > 2**62:
        yield "the requests ask for more bytes than fit an int64"


def _requests(trace: TraceTables) -> Iterator[str]:
    kind, request = trace.events["kind"], trace.events["request"]
    mallocs = np.flatnonzero(kind == EventKind.MALLOC)
    if (wrong := _first(request[mallocs] != np.arange(len(mallocs)))) is not None:
        event = mallocs[wrong]
        yield f"events[{event}] is the malloc of request {request[event]}, where number {wrong} is due"
        return
    frees = np.flatnonzero((kind == EventKind.FREE) & (request >= 0))
    freed = request[frees]
    if (twice := _first(np.bincount(freed, minlength=1) > 1)) is not None:
        yield f"request {twice} is freed more than once"
    if (early := _first(mallocs[freed] > frees)) is not None:
        yield f"events[{frees[early]}] frees request {freed[early]} before it is made"
    if (sized := _first(trace.events["nbytes"][frees] != 0)) is not None:
        yield f"events[{frees[sized]}] is a free of a request of this recording and has a size of its own"


def _steps(trace: TraceTables) -> Iterator[str]:
    ends = (len(trace.operators), len(trace.events))
    before = (0, 0)
    if not isinstance(trace.steps, tuple):
        yield "`steps` is not a tuple"
        return
    for index, step in enumerate(trace.steps):
        kinds = (int, int, (int, float))
        if not isinstance(step, tuple) or len(step) != 3 or not all(map(isinstance, step, kinds)):
            yield f"steps[{index}] is {step!r}, not (first operator, first event, seconds)"
            return
        *first, seconds = step
        if not all(low <= start <= high for low, start, high in zip(before, first, ends, strict=True)):
            yield f"steps[{index}] begins at {tuple(first)}: before the step before it, or beyond the end {ends}"
        if not math.isfinite(seconds) or seconds < 0:
            yield f"steps[{index}] took {seconds} s"
        before = (first[0], first[1])


def _first(wrong: np.ndarray) -> int | None:
    found = np.flatnonzero(wrong)
    return int(found[0]) if found.size else None
