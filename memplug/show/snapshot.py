"""A trace as a memory snapshot that pytorch.org/memory_viz and `torch/cuda/_memory_viz.py` open; needs no torch.

A trace has sizes but no addresses. So this module makes them up: it places each request in the smallest gap that it
fits into, in one segment for each stream, with sizes rounded up to 512 bytes as on CUDA. Requests that are live
together never overlap. The gaps between blocks say nothing about the recorded run. The order of the requests, their
unrounded sizes, operators, layers and phases are those of the recording.
"""

from __future__ import annotations

import bisect
import pickle
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from memplug.figures.groups import BEFORE, PASSES, phase_words
from memplug.profile.allocator_history import ADDRESSES, MADE_UP
from memplug.profile.trace import EventKind, Trace

_ROUNDING_BYTES = 512
# Drivers put device memory at such addresses. The stride leaves room for each stream's segment, and the numbers are
# exact in JavaScript's doubles.
_FIRST_ADDRESS, _SEGMENT_STRIDE = 0x7000_0000_0000, 1 << 46
# memory_viz (November 2026) fails if allocations have categories and none of the categories is this one.
_NO_CATEGORY = "unknown"


def write_snapshot(trace: Trace, path: str | Path) -> None:
    """Write `snapshot(trace)` as a pickle of protocol 4, the newest that memory_viz reads.

    Raises:
        OSError: The file cannot be written.
    """
    Path(path).write_bytes(pickle.dumps(snapshot(trace), protocol=4))


def snapshot(trace: Trace) -> dict[str, Any]:
    """Return the recording in the form of `torch.cuda.memory._snapshot()`: only dicts, lists, str and int.

    Each allocation has up to three stack frames, innermost first: operator, layer and phase. A stack frame's line
    number is the index of the operator, layer or phase in the trace. The category of an allocation is the kind of its
    phase. Memory that was in use before the recording is in the segment of the first stream: one block for each of its
    frees whose size is known, and one for the rest.
    """
    return _Writer(trace).snapshot()


class _Writer:
    """Walks the events once and tracks the addresses in use."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.spaces = {
            stream: _Space(_FIRST_ADDRESS + _SEGMENT_STRIDE * i)
            for i, stream in enumerate(np.unique(trace.events["stream"]).tolist() or [0])
        }
        self.live: dict[int, tuple[int, dict[str, Any]]] = {}  # stream and block, by address
        self.address_of: dict[int, int] = {}  # address, by request
        self.earlier: dict[int, int] = {}  # address of a block from before the recording, by the event that frees it
        # Equal stack frames are one dict, so that pickle stores it once.
        self._frame = cache(lambda kind, number, name: {"filename": kind, "line": number, "name": name})

    def snapshot(self) -> dict[str, Any]:
        """Return the snapshot."""
        self._place_earlier()
        events = [entry for event in range(len(self.trace.events)) for entry in self._entries(event)]
        used = {stream: space for stream, space in self.spaces.items() if space.size}
        nowhere = {"frames": [], "category": _NO_CATEGORY}
        made = [
            {"action": "segment_alloc", "addr": space.start, "size": space.size, "stream": stream, **nowhere}
            for stream, space in used.items()
        ]
        segments = [self._segment(stream, space) for stream, space in used.items()]
        return {"segments": segments, "device_traces": [[*made, *events]], ADDRESSES: MADE_UP}

    def _place_earlier(self) -> None:
        rows, first_stream = self.trace.events, min(self.spaces)
        known = np.flatnonzero((rows["kind"] == EventKind.FREE) & (rows["request"] < 0) & (rows["nbytes"] > 0))
        frames = [self._frame("phase", 0, BEFORE)]
        for event, nbytes in zip(known.tolist(), rows["nbytes"][known].tolist(), strict=True):
            self.earlier[event] = self._occupy(first_stream, nbytes, frames)
        rest = self.trace.base_bytes - int(rows["nbytes"][known].sum())
        if rest > 0:
            self._occupy(first_stream, rest, frames)

    def _entries(self, event: int) -> list[dict[str, Any]]:
        trace = self.trace
        kind, request, nbytes, stream, operator, phase, layer, *_ = trace.events[event].item()
        frames = [self._frame("phase", phase, phase_words(trace.phases[phase]))]
        if layer >= 0:
            frames.insert(0, self._frame("layer", layer, trace.layers[layer].name))
        if operator >= 0:
            frames.insert(0, self._frame("operator", operator, trace.names[trace.operators["name"][operator]]))
        time_us = int(trace.operators["time_ns"][operator]) // 1000 if operator >= 0 else 0
        entry = {"stream": stream, "frames": frames, "time_us": time_us}
        if kind == EventKind.MALLOC:
            address = self.address_of[request] = self._occupy(stream, nbytes, frames)
            category = PASSES[trace.phases[phase].kind].words
            return [{"action": "alloc", "addr": address, "size": nbytes, "category": category, **entry}]
        address = self.earlier.get(event) if request < 0 else self.address_of.pop(request)
        if address is None:
            return []  # it frees a block of unknown size from before the recording
        stream, block = self.live.pop(address)
        self.spaces[stream].release(address, block["size"])
        freed = {"addr": address, "size": block["requested_size"], **entry, "stream": stream}
        return [{"action": action, **freed} for action in ("free_requested", "free_completed")]

    def _occupy(self, stream: int, nbytes: int, frames: list[dict[str, Any]]) -> int:
        size = max(-(-nbytes // _ROUNDING_BYTES), 1) * _ROUNDING_BYTES
        address = self.spaces[stream].place(size)
        self.live[address] = stream, {"size": size, "requested_size": nbytes, "frames": frames}
        return address

    def _segment(self, stream: int, space: _Space) -> dict[str, Any]:
        blocks, at, end = [], space.start, space.start + space.size
        mine = sorted((address, block) for address, (its, block) in self.live.items() if its == stream)
        for address, block in [*mine, (end, {"size": 0})]:
            if address > at:
                gap = {"address": at, "size": address - at, "requested_size": 0, "state": "inactive", "frames": []}
                blocks.append(gap)
            if address < end:
                blocks.append({"address": address, "state": "active_allocated", **block})
            at = address + block["size"]
        in_use = sum(block["size"] for _, block in mine)
        return {
            "device": 0,
            "address": space.start,
            "total_size": space.size,
            "allocated_size": in_use,
            "active_size": in_use,
            "requested_size": sum(block["requested_size"] for _, block in mine),
            "stream": stream,
            "segment_type": "large",
            "segment_pool_id": [0, 0],
            "is_expandable": False,
            "frames": [],
            "blocks": blocks,
        }


class _Space:
    """A range of addresses, parts of which are in use; `size` reaches from `start` to the highest end so far."""

    def __init__(self, start: int) -> None:
        self.start, self.size = start, 0
        self._gaps = [(start, start + _SEGMENT_STRIDE)]  # [from, to), sorted; the last one ends the range

    def place(self, size: int) -> int:
        """Take `size` bytes of the smallest gap that holds them, and return their address."""
        _, at = min((end - start, at) for at, (start, end) in enumerate(self._gaps) if end - start >= size)
        start, end = self._gaps[at]
        self._gaps[at : at + 1] = [(start + size, end)] if end - start > size else []
        self.size = max(self.size, start + size - self.start)
        return start

    def release(self, start: int, size: int) -> None:
        """Make `size` bytes at `start` a gap again, joined with the gaps beside it."""
        end, at = start + size, bisect.bisect(self._gaps, (start,))
        behind = at + (self._gaps[at][0] == end)
        before = at - (at > 0 and self._gaps[at - 1][1] == start)
        joined = [*self._gaps[before:behind], (start, end)]
        self._gaps[before:behind] = [(min(joined)[0], max(joined)[1])]
