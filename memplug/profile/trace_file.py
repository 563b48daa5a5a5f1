"""Saves and loads traces: one .npz without pickle, written whole or not at all, and refused with a reason if damaged.

A file contains the four arrays of a trace, its other fields as JSON in the uint8 array `meta`, and a digest of all
these in `sha256`. `numpy.load` opens it too. Files of format 0 are older than `Trace`; memplug reads them
(`_read_legacy`), but does not write them.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import zipfile
from pathlib import Path
from typing import BinaryIO

import numpy as np
from pydantic import BaseModel, ConfigDict

from memplug.errors import TraceError
from memplug.files import opened, path_of, write_whole
from memplug.profile.trace import (
    OPERATOR,
    REQUEST_EVENT,
    TENSOR,
    USE,
    EventKind,
    Fingerprint,
    Layer,
    Pass,
    Phase,
    Trace,
)

FORMAT = 2
"""Version of the files that `save` writes; `load` also reads format 0."""

_ARRAYS = ("operators", "uses", "tensors", "events")
_MEMBERS = ("meta", *_ARRAYS, "sha256")
_DEFLATE_RATIO = 1032  # the largest compression ratio of deflate (zlib, "technical details")
_DAMAGED = "Copy it again from where it was recorded, or record it again."
_LEGACY_COLUMNS = ("kind", "request", "nbytes", "phase", "layer", "stream")


class _Meta(BaseModel):
    """The fields of a trace that are not arrays."""

    model_config = ConfigDict(frozen=True, strict=True)

    format: int
    fingerprint: Fingerprint
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    phases: tuple[Phase, ...]
    layers: tuple[Layer, ...]
    steps: tuple[tuple[int, int, float], ...]
    base_bytes: int
    peak_bytes: int


def save(trace: Trace, path: str | Path) -> None:
    """Write a trace; the file at `path` is always either the old one or the whole new one.

    Equal traces make equal files.

    Args:
        trace: any trace.
        path: a file in an existing folder; by convention *.npz.

    Raises:
        TraceError: the file cannot be written there.
    """
    path = path_of(path, "trace (.npz)", TraceError)
    fields = {name: getattr(trace, name) for name in _Meta.model_fields if name != "format"}
    meta = _Meta(format=FORMAT, **fields).model_dump_json().encode()
    arrays = {"meta": np.frombuffer(meta, np.uint8), **{name: getattr(trace, name) for name in _ARRAYS}}
    arrays["sha256"] = _digest(arrays)
    write_whole(path, "trace", lambda file: _write_npz(file, arrays), TraceError)


def load(path: str | Path) -> Trace:
    """Read a file that `save` wrote, or one of format 0.

    Loading never unpickles, and allocates no more than the file's bytes can decompress to.

    Returns:
        The trace, equal to the saved one.

    Raises:
        TraceError: the file is missing, is no trace, is damaged or truncated, or is of an unknown format.
    """
    path = path_of(path, "trace (.npz)", TraceError)
    with opened(path, "trace (.npz)", TraceError) as file:
        try:
            arrays = _read_npz(file)
            return _read(arrays) if "meta" in arrays else _read_legacy(arrays["events"])
        except TraceError as error:
            raise TraceError(f"{path}: {error.problem}", error.advice) from error
        except Exception as error:
            # the readers of zip, npy and JSON raise a dozen types of errors on arbitrary bytes
            raise TraceError(f"{path}: damaged: {type(error).__name__}: {error}", _DAMAGED) from error


def _read(arrays: dict[str, np.ndarray]) -> Trace:
    meta = arrays["meta"].tobytes()
    try:
        version = json.loads(meta)["format"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise TraceError("not a trace of memplug: its `meta` is not that of a trace") from None
    if version != FORMAT:
        raise TraceError(
            f"a trace of format {version}, and this memplug reads format {FORMAT}",
            "Install the memplug that recorded it, an older or a newer one, or record it again with this one.",
        )
    missing = [name for name in _MEMBERS if name not in arrays]
    if missing:
        raise TraceError(f"damaged: without {', '.join(missing)}", _DAMAGED)
    if not np.array_equal(arrays["sha256"], _digest(arrays)):
        raise TraceError("damaged: the contents are not what was saved", _DAMAGED)
    fields = {name: value for name, value in _Meta.model_validate_json(meta) if name != "format"}
    return Trace(**fields, **{name: arrays[name] for name in _ARRAYS})


def _read_legacy(rows: np.ndarray) -> Trace:
    """Return a trace that has only requests, from int64 rows of `_LEGACY_COLUMNS`.

    A request of -1 was allocated before the recording; a layer of -1 means outside of all layers.

    Phases below 100 number the forwards and backwards of a step. The file does not say which is which, so each becomes
    `Pass.EITHER` with its number as the micro-batch. Phase 100 is the optimizer, phase 200 the time before the first
    forward. Steps begin at the first row, wherever phase 100 ends, and wherever phase 200 begins. Layers get the names
    "layers.NUMBER".
    """
    if rows.dtype != np.int64 or rows.ndim != 2 or rows.shape[1] != len(_LEGACY_COLUMNS):
        raise TraceError(f"`events` is an array {rows.dtype}{list(rows.shape)}, not a recording of memory requests")
    events = np.zeros(len(rows), REQUEST_EVENT)
    columns = dict(zip(_LEGACY_COLUMNS, rows.T, strict=True))
    if np.any((columns["kind"] < 0) | (columns["kind"] >= len(EventKind))) or np.any(columns["layer"] < -1):
        raise TraceError("`events` holds rows that are neither a malloc nor a free, or of a layer below -1")
    for name in ("kind", "request", "nbytes", "stream"):
        events[name] = columns[name]
    events["operator"] = -1
    numbers, events["phase"] = np.unique(columns["phase"], return_inverse=True)
    layers, events["layer"] = np.unique(columns["layer"], return_inverse=True)
    # `np.unique` sorts, so layer -1 has got index 0; make it -1 again
    outside = int(layers.size > 0 and layers[0] == -1)
    events["layer"] -= outside
    previous = np.concatenate([[100], columns["phase"]])[:-1]
    begins = (columns["phase"] != previous) & ((previous == 100) | (columns["phase"] == 200))
    begins[:1] = True
    return Trace(
        fingerprint=Fingerprint(),
        names=(),
        dtypes=(),
        phases=tuple(map(_legacy_phase, numbers.tolist())),
        layers=tuple(Layer(f"layers.{number}") for number in layers[outside:]),
        operators=np.empty(0, OPERATOR),
        uses=np.empty(0, USE),
        tensors=np.empty(0, TENSOR),
        events=events,
        steps=tuple((0, event, 0.0) for event in np.flatnonzero(begins).tolist()),
    )


def _legacy_phase(number: int) -> Phase:
    if 0 <= number < 100:
        return Phase(Pass.EITHER, number)
    if number not in (100, 200):
        raise TraceError(f"`events` holds phase {number}, which has no meaning")
    return Phase(Pass.OPTIMIZER if number == 100 else Pass.OTHER)


def _digest(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Return the digest of `meta` and of a trace's arrays, uint8[32]."""
    digest = hashlib.sha256()
    for name in ("meta", *_ARRAYS):
        # with the lengths, the digest also changes if bytes move from one array to the next
        digest.update(f"{name} {arrays[name].nbytes}\n".encode())
        digest.update(np.ascontiguousarray(arrays[name]).view(np.uint8))
    return np.frombuffer(digest.digest(), np.uint8)


def _write_npz(file: BinaryIO, arrays: dict[str, np.ndarray]) -> None:
    # numpy.savez does not promise that equal traces make equal files
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            entry = zipfile.ZipInfo(f"{name}.npy")
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            with archive.open(entry, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _read_npz(file: BinaryIO) -> dict[str, np.ndarray]:
    """Return, as read-only arrays, the members of an .npz that a trace has; do not read any others."""
    size = os.fstat(file.fileno()).st_size
    if not zipfile.is_zipfile(file):
        raise TraceError("not a trace, or cut short: it is no .npz file")
    with zipfile.ZipFile(file) as archive:
        entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
        if "meta" not in entries and list(entries) != ["events"]:
            names = list(entries)
            shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            raise TraceError(f"not a trace of memplug: it holds {shown or 'nothing'}")
        return {name: _member(archive, entries[name], size) for name in _MEMBERS if name in entries}


def _member(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, size: int) -> np.ndarray:
    # trust the sizes in the archive's directory only as far as the file's bytes allow
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{entry.filename} is compressed by an unknown method")
    if entry.compress_size > size or entry.file_size > _DEFLATE_RATIO * (entry.compress_size + 1):
        raise ValueError(f"{entry.filename} declares a size that it cannot have")
    content = archive.read(entry)
    stream = io.BytesIO(content)
    if np.lib.format.read_magic(stream) == (1, 0):
        shape, column_major, dtype = np.lib.format.read_array_header_1_0(stream)
    else:
        shape, column_major, dtype = np.lib.format.read_array_header_2_0(stream)
    nbytes = len(content) - stream.tell()
    if dtype.hasobject or column_major or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != nbytes:
        raise ValueError(f"{entry.filename} is no plain array of the size that it declares")
    return np.frombuffer(content, dtype, offset=stream.tell()).reshape(shape)
