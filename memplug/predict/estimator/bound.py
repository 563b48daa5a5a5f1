"""What holds a step up, read off the spans of the virtual device's streams."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from memplug.profile.operator_names import COLLECTIVES

COPIES = ("to host", "to device")
IDLE_SHARE = 0.02  # of a step, up to which kernels bound it


def bound(spans: Iterable[Any], step_s: float) -> str:
    """Where kernels take all of the step "compute"; else what goes on the longest while none runs: "link" where a copy
    does, "collectives", or "host" where nothing does.

    Args:
        spans: as `VirtualDevice.take_spans` gives them, of one step.
        step_s: how long the step took, in seconds.
    """
    kernels, copies, collectives = [], [], []
    for span in spans:
        is_collective = span.name.startswith(COLLECTIVES)
        of_kind = copies if span.name in COPIES else collectives if is_collective else kernels
        of_kind.append((span.begin_s, span.end_s))
    busy_s = _seconds(_merged(kernels))
    if step_s - busy_s <= IDLE_SHARE * step_s:
        return "compute"
    waits_s = {
        "link": _seconds(_merged([*kernels, *copies])) - busy_s,
        "collectives": _seconds(_merged([*kernels, *collectives])) - busy_s,
        "host": step_s - _seconds(_merged([*kernels, *copies, *collectives])),
    }
    return max(waits_s, key=lambda kind: waits_s[kind])


def _merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Half-open intervals, without overlaps."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def _seconds(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in spans)
