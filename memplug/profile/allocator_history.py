"""Reads memory snapshots of torch's CUDA allocator (`torch.cuda.memory._dump_snapshot`).

The result is the history of one device: its requests, their frees, and the memory that torch reserved.

A snapshot contains the latest events of each device, and the blocks that were in use at the time of the snapshot
(torch/cuda/memory.py, `_snapshot`). Older events may be missing. A block without a malloc counts as in use from the
first event on, and a block without a free counts as in use to the end.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memplug.errors import TraceError
from memplug.files import opened, path_of
from memplug.profile import plain_pickle
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

ADDRESSES, MADE_UP = "addresses", "made up by memplug"
"""Key and value that mark a snapshot as made by memplug from a trace (`show.snapshot`)."""

_FREED = ("free_completed", "free_requested")  # the first of these actions that the history contains marks frees
_RESERVED = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_DAMAGED = "Copy it again from where it was written, or write it again with torch.cuda.memory._dump_snapshot."
_MOST_BYTES = 1 << 56  # largest size or address; no machine has more


@dataclass(frozen=True, kw_only=True)
class History:
    """The history of torch's allocator on one device.

    Attributes:
        trace: the device's requests, with the sizes requested; its layers are the lines of code that made the requests.
        device: number of the device.
        devices: numbers of all devices with events in the snapshot.
        reserved_bytes: the most bytes that torch reserved at a time; None if unknown, or if memplug made the snapshot.
        missing: number of events that must have happened while torch did not record.
        out_of_memory: number of requests that failed.
    """

    trace: Trace
    device: int
    devices: tuple[int, ...]
    reserved_bytes: int | None
    missing: int
    out_of_memory: int


def is_snapshot(path: str | Path) -> bool:
    """Return whether a file is a pickle.

    Raises:
        TraceError: the file cannot be read.
    """
    with opened(path_of(path, "trace or snapshot", TraceError), "trace (.npz) or a snapshot", TraceError) as file:
        return plain_pickle.is_pickle(file.read(2))


def load(path: str | Path, device: int | None = None) -> History:
    """Read a snapshot without running code from its pickle.

    Args:
        path: path of the pickle.
        device: number of the device, by default the one with the most events.

    Returns:
        The history of the device.

    Raises:
        TraceError: the file cannot be read, is damaged, is no snapshot, or has no events of that device.
    """
    path = path_of(path, "snapshot of torch's allocator", TraceError)
    with opened(path, "snapshot of torch's allocator", TraceError) as file:
        content = file.read()
    try:
        return _history(plain_pickle.loads(content), device, len(content))
    except TraceError as error:
        raise TraceError(f"{path}: {error.problem}", error.advice) from error
    except plain_pickle.NotPlainError as error:
        raise TraceError(
            f"{path}: not a snapshot of torch's allocator: {error}",
            "Give a file of torch.cuda.memory._dump_snapshot, which holds numbers and text alone.",
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise TraceError(f"{path}: damaged: {type(error).__name__}: {error}", _DAMAGED) from error


def _history(snapshot: Any, device: int | None, file_bytes: int) -> History:
    if not isinstance(snapshot, dict) or not isinstance(snapshot.get("device_traces"), list):
        raise TraceError("not a snapshot of torch's allocator: it has no `device_traces`", _DAMAGED)
    traces = snapshot["device_traces"]
    devices = tuple(number for number, events in enumerate(traces) if events)
    if not devices:
        raise TraceError(
            "the snapshot has no history, only the blocks in use at its end",
            "Call torch.cuda.memory._record_memory_history() before the steps, and _dump_snapshot() after them.",
        )
    if device is None:
        device = max(devices, key=lambda number: len(traces[number]))
    if device not in devices:
        raise TraceError(
            f"the snapshot has no events of device {device}",
            f"Choose a device with events ({', '.join(map(str, devices))}), or none to get the one with the most.",
        )
    segments = [segment for segment in snapshot.get("segments", ()) if segment.get("device", 0) == device]
    replay = _Replay(traces[device])
    replay.run()
    replay.end(_blocks(segments, file_bytes), known=bool(segments))
    reserved = sum(_size(segment["total_size"]) for segment in segments)
    return History(
        trace=replay.trace(),
        device=device,
        devices=devices,
        reserved_bytes=None if snapshot.get(ADDRESSES) == MADE_UP else replay.most_reserved(reserved) or None,
        missing=replay.missing,
        out_of_memory=sum(entry["action"] == "oom" for entry in traces[device]),
    )


def _blocks(segments: Iterable[Mapping[str, Any]], file_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield address and requested size of the blocks that were in use at the time of the snapshot.

    Raises:
        TraceError: there are more blocks than the file has bytes. A damaged pickle can refer to one block many times.
    """
    seen = 0
    for segment in segments:
        address = _size(segment["address"])
        seen += len(segment["blocks"]) + 1
        if seen > file_bytes:
            raise TraceError("damaged: it has more blocks than bytes", _DAMAGED)
        for block in segment["blocks"]:
            if str(block["state"]).startswith("active"):
                yield _size(block.get("address", address)), _size(block.get("requested_size", block["size"]))
            address += _size(block["size"])


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MOST_BYTES:
        raise ValueError(f"{str(value)[:40]} is no address or size")
    return value


class _Replay:
    """Replays the events of a device, tracks the blocks in use, and makes the rows of a trace."""

    def __init__(self, entries: Sequence[Mapping[str, Any]]) -> None:
        actions = {entry["action"] for entry in entries}
        self._entries = entries
        self._freed = next((each for each in _FREED if each in actions), _FREED[0])
        self._rows: list[tuple[int, int, int, int, int]] = []  # kind, request, bytes, stream, layer
        self._live: dict[int, tuple[int, int, int]] = {}  # request, bytes and stream, by address
        self._order: list[int] = []  # the addresses in `_live`, ascending
        self._seen: set[int] = set()
        self._streams: dict[Any, int] = {0: 0}
        self._sites: dict[str, int] = {}
        self._site_of: dict[int, int] = {}  # index in `_sites`, by the `id` of a list of frames
        self._changes: list[int] = []  # changes of the reserved bytes
        self._requests = 0
        self.base_bytes = 0
        self.missing = 0

    def run(self) -> None:
        """Replay all events."""
        for entry in self._entries:
            action = entry["action"]
            if action == "alloc":
                self._alloc(entry)
            elif action == self._freed:
                self._free(entry)
            elif action in _RESERVED:
                size = _size(entry["size"])
                self._changes.append(_RESERVED[action] * size)
                if _RESERVED[action] < 0:
                    self._lose(_size(entry["addr"]), size)

    def end(self, blocks: Iterable[tuple[int, int]], *, known: bool) -> None:
        """Complete the replay with the blocks that were in use at the time of the snapshot.

        A block of `blocks` for which the snapshot has no events was in use all along. If the snapshot lists its blocks
        (`known`), the replay frees each block in use that is not listed, and counts this free as missing.
        """
        at_end = set()
        for address, size in blocks:
            at_end.add(address)
            if address in self._live:
                continue
            if address in self._seen:
                self.missing += 1
            else:
                self.base_bytes += size
        for address in list(self._live) if known else ():
            if address not in at_end:
                self._drop(address)

    def most_reserved(self, at_end: int) -> int:
        """Return the most bytes that torch reserved at a time, from the bytes that were reserved at the end."""
        most = reserved = at_end
        for change in reversed(self._changes):
            reserved -= change
            most = max(most, reserved)
        return most

    def trace(self) -> Trace:
        """Return the replayed requests as a trace."""
        events = np.zeros(len(self._rows), REQUEST_EVENT)
        columns = np.array(self._rows, np.int64).reshape(-1, 5).T
        for name, column in zip(("kind", "request", "nbytes", "stream", "layer"), columns, strict=True):
            events[name] = column
        events["operator"] = -1
        return Trace(
            fingerprint=Fingerprint(),
            names=(),
            dtypes=(),
            phases=(Phase(Pass.OTHER),),
            layers=tuple(map(Layer, self._sites)),
            operators=np.empty(0, OPERATOR),
            uses=np.empty(0, USE),
            tensors=np.empty(0, TENSOR),
            events=events,
            steps=(),
            base_bytes=self.base_bytes,
        )

    def _alloc(self, entry: Mapping[str, Any]) -> None:
        address, size = _size(entry["addr"]), _size(entry["size"])
        self._lose(address, max(size, 1))
        stream = self._stream(entry)
        self._rows.append((EventKind.MALLOC, self._requests, size, stream, self._site(entry.get("frames") or ())))
        self._live[address] = self._requests, size, stream
        bisect.insort(self._order, address)
        self._seen.add(address)
        self._requests += 1

    def _free(self, entry: Mapping[str, Any]) -> None:
        address, size = _size(entry["addr"]), _size(entry["size"])
        if address in self._live:
            self._drop(address, missing=0)
        elif address in self._seen:
            self.missing += 1  # a malloc is missing: the last block that the replay saw here is already freed
        else:
            self._seen.add(address)
            self.base_bytes += size
            self._rows.append((EventKind.FREE, -1, size, self._stream(entry), -1))

    def _lose(self, address: int, size: int) -> None:
        """Free the blocks in use that overlap an address range, and count their frees as missing."""
        at = bisect.bisect_right(self._order, address)
        if at and self._order[at - 1] + self._live[self._order[at - 1]][1] > address:
            at -= 1
        while at < len(self._order) and self._order[at] < address + size:
            self._drop(self._order[at])

    def _drop(self, address: int, missing: int = 1) -> None:
        request, _, stream = self._live.pop(address)
        del self._order[bisect.bisect_left(self._order, address)]
        self._rows.append((EventKind.FREE, request, 0, stream, -1))
        self.missing += missing

    def _stream(self, entry: Mapping[str, Any]) -> int:
        return self._streams.setdefault(entry.get("stream", 0), len(self._streams))

    def _site(self, frames: Sequence[Mapping[str, Any]]) -> int:
        """Return the index in `_sites` of the code that made a request; -1 if unknown.

        The code is the innermost Python frame outside torch, or else the innermost Python frame in torch.
        """
        # many events share one list of frames, which the pickle contains once
        if (known := self._site_of.get(id(frames))) is not None:
            return known
        name = next(map(_named, filter(_is_users, frames)), "") or next(map(_named, filter(_is_python, frames)), "")
        found = self._site_of[id(frames)] = self._sites.setdefault(name, len(self._sites)) if name else -1
        return found


def _is_python(frame: Mapping[str, Any]) -> bool:
    return str(frame.get("filename", "")).endswith(".py")


def _is_users(frame: Mapping[str, Any]) -> bool:
    name = str(frame.get("filename", "")).replace("\\", "/")
    return name == "layer" or (name.endswith(".py") and "/torch/" not in name)


def _named(frame: Mapping[str, Any]) -> str:
    if frame["filename"] == "layer":  # in a snapshot that memplug made
        return str(frame["name"])
    file = str(frame["filename"]).replace("\\", "/").rsplit("/", 1)[-1]
    return f"{file}:{frame['line']} {frame['name']}"
