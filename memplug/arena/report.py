"""The arena's part of the session's report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from memplug.arena.arena import Counters
from memplug.arena.plan.part import AddressPlan
from memplug.session.technique_report import FollowerReport, keyed

_NOT_YET = {
    "waiting": "no step repeated the one before it",
    "recording": "the run ended before the step that addresses are planned from",
    "planning": "the run ended while addresses were planned",
}
"""Reasons why the arena served no request, by its state at the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArenaReport(FollowerReport):
    """Counts since the session began, and memory held now and predicted; bytes as requested unless said otherwise.

    Attributes:
        plans: plans made from a recorded step.
        amendments: plans made again without another recording, with longer lifetimes, a larger room, or more dynamic
            requests.
        bytes: reserved now, with memory of earlier plans that is still in use.
        room_bytes: the part of the plan in force that is for dynamic requests, at its highest.
        live_bytes: in use now.
        peak_bytes: the most in use since the last plan, in whole blocks.
        fragmentation: share of the reserved bytes that no block occupies now.
        peak_fragmentation: the same share when the most bytes were in use.
        predicted_fragmentation: that share as the plan in force predicts it; None without a plan.
        predicted_efficiency: share of the arena in use at the recorded steps' peak, as the plan in force has it; None
            without a plan, or without a room for its dynamic requests.
        served_bytes, served: requests served at their planned addresses.
        dynamic_bytes, dynamic: requests whose sizes depend on data, served from their group's reusable space.
        dynamic_missed_bytes, dynamic_missed: requests whose sizes depend on data and for which that space had no room.
        reusable_bytes, reusable: requests served from other reusable space.
        fallback_bytes, fallback: other requests of training that torch's allocator served although a plan was in force.
        lasting_bytes, lasting: requests that torch's allocator served because their blocks outlive the step.
        leftover_bytes: held now by blocks that outlived their step although the plan did not know.
        native_bytes: in use now in torch's own allocator; None without an arena, and except on CUDA.
        native_reserved_bytes: reserved now by torch's own allocator; None where `native_bytes` is.
        efficiency: share of all reserved bytes, the arena's and torch's, that is in use when the arena has the most
            bytes in use; of the arena's alone where `native_bytes` is None (torch's allocator for the CPU reserves no
            more than is in use); None until a step has been served since the last plan.
        step_served: share of the last step's bytes that the arena served, without those of requests that outlive the
            step; None if there were none.
    """

    prefix: ClassVar[str] = "arena_"

    plans: int = 0
    amendments: int = 0
    bytes: int = 0
    room_bytes: int = 0
    live_bytes: int = 0
    peak_bytes: int = 0
    fragmentation: float = 0.0
    peak_fragmentation: float = 0.0
    predicted_fragmentation: float | None = None
    efficiency: float | None = None
    predicted_efficiency: float | None = None
    step_served: float | None = None
    served_bytes: int = 0
    served: int = 0
    dynamic_bytes: int = 0
    dynamic: int = 0
    dynamic_missed_bytes: int = 0
    dynamic_missed: int = 0
    reusable_bytes: int = 0
    reusable: int = 0
    fallback_bytes: int = 0
    fallback: int = 0
    lasting_bytes: int = 0
    lasting: int = 0
    leftover_bytes: int = 0
    native_bytes: int | None = keyed("native_bytes")
    native_reserved_bytes: int | None = keyed("native_reserved_bytes")

    def closing(self) -> str:
        """Return the share of bytes that the arena served and its efficiency, or why it served none."""
        served_bytes = self.served_bytes + self.dynamic_bytes + self.reusable_bytes
        if served_bytes:
            of = "the arena's" if self.native_bytes is None else "all reserved"
            used = f"; {self.efficiency:.1%} of {of} bytes in use at the peak" if self.efficiency else ""
            return f"{served_bytes / (served_bytes + self.fallback_bytes):.1%} of bytes served by the arena{used}"
        why = self.off_because or _NOT_YET.get(self.state)
        return f"no arena: {why}" if why else ""


def report_of(
    counters: Counters,
    step: Counters,
    plan: AddressPlan | None,
    native_bytes: int | None,
    native_reserved_bytes: int | None,
    has_served: bool,
    **others: Any,
) -> ArenaReport:
    """Return the report of an arena from its counters.

    Args:
        counters: counts since the session began.
        step: counts of the step that ended last.
        plan: the plan that the arena serves, or served last.
        native_bytes: see `ArenaReport`.
        native_reserved_bytes: see `ArenaReport`.
        has_served: whether a step was served since the last plan.
        others: the fields that do not come from counters.
    """
    served_bytes = step.planned_bytes + step.dynamic_bytes + step.reusable_bytes
    asked_bytes = served_bytes + step.fallback_bytes
    reserved, efficiency = counters.reserved_bytes, None
    if reserved and has_served:
        efficiency = (counters.peak_size + (native_bytes or 0)) / (reserved + (native_reserved_bytes or 0))
    return ArenaReport(
        native_bytes=native_bytes,
        native_reserved_bytes=native_reserved_bytes,
        efficiency=efficiency,
        bytes=reserved,
        room_bytes=plan.problem.room_bytes if plan else 0,
        live_bytes=counters.live_bytes,
        peak_bytes=counters.peak_size,
        fragmentation=1 - counters.live_size / reserved if reserved else 0.0,
        peak_fragmentation=1 - counters.peak_size / reserved if reserved else 0.0,
        predicted_fragmentation=plan.predictions.fragmentation if plan else None,
        predicted_efficiency=plan.efficiency if plan else None,
        served=counters.planned,
        served_bytes=counters.planned_bytes,
        dynamic=counters.dynamic,
        dynamic_bytes=counters.dynamic_bytes,
        dynamic_missed_bytes=counters.dynamic_missed_bytes,
        dynamic_missed=counters.dynamic_missed,
        reusable=counters.reusable,
        reusable_bytes=counters.reusable_bytes,
        fallback=counters.fallback,
        fallback_bytes=counters.fallback_bytes,
        lasting=counters.lasting,
        lasting_bytes=counters.lasting_bytes,
        leftover_bytes=counters.leftover_bytes,
        step_served=served_bytes / asked_bytes if asked_bytes else None,
        **others,
    )
