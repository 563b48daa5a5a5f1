"""What holds a step up, read off the spans of the virtual device's streams."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

COPIES = ("to host", "to device")
IDLE_SHARE = 0.02  # of a step, up to which kernels bound it


def bound(spans: Iterable[Any], step_s: float) -> str:
    """Where kernels take all of the step "compute"; else what goes on while none runs: "link" where a copy does, "host"
    where nothing does.

    Args:
        spans: as `VirtualDevice.take_spans` gives them, of one step.
        step_s: how long the step took, in seconds.
    """
    spans = list(spans)
    kernels = _merged((span.begin_s, span.end_s) for span in spans if span.name not in COPIES)
    copies = _merged((span.begin_s, span.end_s) for span in spans if span.name in COPIES)
    if step_s - _seconds(kernels) <= IDLE_SHARE * step_s:
        return "compute"
    either_s = _seconds(_merged([*kernels, *copies]))
    return "link" if either_s - _seconds(kernels) >= step_s - either_s else "host"


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
