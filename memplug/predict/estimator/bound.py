"""The bottleneck of a step, found from the spans of the virtual device's streams."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from memplug.profile.operator_names import COLLECTIVES

COPIES = ("to host", "to device")
IDLE_SHARE = 0.02  # a step is bound by compute if the time without a running kernel is at most this fraction


def bound(spans: Iterable[Any], step_s: float) -> str:
    """Return the bottleneck of a step.

    The bottleneck is "compute" if kernels run nearly all of the time. Otherwise it is the activity that fills most of
    the time without a running kernel: "link" (copies), "collectives", or "host" (the device is idle).

    Args:
        spans: The step's spans, from `VirtualDevice.take_spans`.
        step_s: Duration of the step, in seconds.
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
    """Merge overlapping half-open intervals and return them in order."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def _seconds(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in spans)
