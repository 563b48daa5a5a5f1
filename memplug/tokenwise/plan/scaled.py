"""Scales what was observed in one step to a larger step that differs in nothing but sizes.

Bytes and times grow as the inputs do. Attention's time grows as their square does, if sequences get longer. If there
are more of them instead, plans expect attention to take longer than it will.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import ceil

from memplug.tokenwise.plan.model import InFlight, PlannedOperator, PlannedRegion


def region(observed: PlannedRegion, scale: float) -> PlannedRegion:
    """Return a region as it would be with inputs of `scale` times the size, at least 1."""
    if scale == 1.0:
        return observed
    return replace(
        observed,
        operators=tuple(_operator(each, scale) for each in observed.operators),
        input_bytes=ceil(scale * observed.input_bytes),
        forward_s=scale * observed.forward_s,
        backward_s=scale * observed.backward_s,
        saved_bytes=ceil(scale * observed.saved_bytes),
    )


def _operator(observed: PlannedOperator, scale: float) -> PlannedOperator:
    return replace(
        observed,
        time_s=observed.time_s * (scale**2 if observed.always_swapped else scale),
        output_bytes=ceil(scale * observed.output_bytes),
        rows=ceil(scale * observed.rows),
    )


def in_flight(observed: Iterable[InFlight], scale: float) -> tuple[InFlight, ...]:
    """Return the times at which swapped tensors are in flight, with the room that the device has then."""
    return tuple(InFlight(each.count, int(scale * each.room_bytes)) for each in observed)


def peak_bytes(observed_bytes: int, base_bytes: int, scale: float) -> int:
    """Return the peak of a step, of which `base_bytes` are there before it begins, as weights are."""
    return ceil(base_bytes + scale * max(0, observed_bytes - base_bytes))
