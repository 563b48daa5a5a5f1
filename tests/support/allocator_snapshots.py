"""Snapshots in the format of torch's CUDA allocator (torch/cuda/memory.py, `_snapshot`), made by hand."""

from __future__ import annotations

from typing import Any

MIB = 1 << 20
FRAMES = [
    {"filename": "/usr/lib/python3/torch/nn/functional.py", "line": 7, "name": "linear"},
    {"filename": "/home/me/model.py", "line": 12, "name": "forward"},
    {"filename": "/home/me/train.py", "line": 3, "name": "main"},
]


def event(action: str, addr: int = 0, size: int = 0, **fields: Any) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": 1, "frames": FRAMES, **fields}


def freed(addr: int, size: int, **fields: Any) -> list[dict[str, Any]]:
    return [event("free_requested", addr, size, **fields), event("free_completed", addr, size, **fields)]


def segment(address: int, size: int, blocks: dict[int, int], **fields: Any) -> dict[str, Any]:
    """Return a segment with these blocks in use (address -> requested size); the segment's other bytes are inactive."""
    found, at = [], address
    for start, nbytes in [*sorted(blocks.items()), (address + size, 0)]:
        if start > at:
            found.append({"address": at, "size": start - at, "requested_size": 0, "state": "inactive", "frames": []})
        taken = -(-nbytes // 512) * 512
        if nbytes:
            found.append({"address": start, "size": taken, "requested_size": nbytes, "state": "active_allocated"})
        at = start + taken
    return {
        **{"device": 0, "address": address, "total_size": size, "stream": 0, "segment_type": "large", "blocks": found},
        **{"segment_pool_id": (0, 0), "is_expandable": False, "frames": [], **fields},
    }


def snapshot(events: list[dict], segments: list[dict], devices: int = 1) -> dict[str, Any]:
    """Return a snapshot whose events all belong to the last device."""
    return {
        "segments": segments,
        "device_traces": [*([] for _ in range(devices - 1)), events],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "",
            "max_split_size": -1,
            "garbage_collection_threshold": 0.0,
        },
        "external_annotations": [],
    }


def steps(truncated: bool = False) -> dict[str, Any]:
    """Return the snapshot of a few steps.

    Two blocks are older than the recording; one of them is freed. Three requests follow. One of them is on another
    stream and is freed late; another one is in use at the end. 4 MiB are reserved at the start, and 16 more for a time.
    """
    start, later = 0x7F00_0000_0000, 0x7F10_0000_0000
    events = [
        event("snapshot"),
        event("alloc", start + 2 * MIB, 1000),
        event("segment_alloc", later, 16 * MIB, stream=9),
        event("alloc", later, 3 * MIB, stream=9),
        *freed(start, MIB),  # older than the recording
        event("free_requested", later, 3 * MIB, stream=9),
        event("alloc", start, 700_000),
        event("free_completed", later, 3 * MIB, stream=9),
        *freed(start + 2 * MIB, 1000),
        event("segment_free", later, 16 * MIB, stream=9),
        event("oom", size=1 << 40, device_free=5),
    ]
    held = {start: 700_000, start + 3 * MIB: 5000}
    return snapshot(events[6:] if truncated else events, [segment(start, 4 * MIB, held)])
