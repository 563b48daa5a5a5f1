"""The report of the arena."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from memplug.arena.arena import Counters
from memplug.arena.plan.part import AddressPlan
from memplug.session.technique_report import FollowerReport, keyed


@dataclass(frozen=True, kw_only=True, slots=True)
class ArenaReport(FollowerReport):
    """Requests since the session began, and memory held now and promised. Bytes are as asked for unless said otherwise.

    Attributes:
        plans: how many were made of a recorded step.
        bytes: reserved now, with what is still in use of earlier plans.
        live_bytes: in use now.
        peak_bytes: the most in use since the last plan, in whole blocks.
        fragmentation: share of the reserved bytes that no block occupies now.
        peak_fragmentation: the same at the most that was in use.
        predicted_fragmentation: of the plan in force, at its peak; None without one.
        served, served_bytes: requests that got their planned addresses.
        dynamic, dynamic_bytes: requests whose sizes depend on data, served from their group's reusable space.
        dynamic_missed: of such requests, those for which that space had no room.
        reusable, reusable_bytes: requests served from other reusable space.
        fallback, fallback_bytes: requests that the native allocator served although a plan was there.
        lasting, lasting_bytes: likewise, as their blocks outlive the step.
        leftover_bytes: held now by blocks of earlier steps that the plan did not know to last.
        native_bytes: in use now of the native allocator; None without an arena, and on the CPU.
        step_served: share of the last step's requests that the arena had bytes for, but for those that outlive it; None
            where there were none.
    """

    prefix: ClassVar[str] = "arena_"

    plans: int = 0
    bytes: int = 0
    live_bytes: int = 0
    peak_bytes: int = 0
    fragmentation: float = 0.0
    peak_fragmentation: float = 0.0
    predicted_fragmentation: float | None = None
    served: int = 0
    served_bytes: int = 0
    dynamic: int = 0
    dynamic_bytes: int = 0
    dynamic_missed: int = 0
    reusable: int = 0
    reusable_bytes: int = 0
    fallback: int = 0
    fallback_bytes: int = 0
    lasting: int = 0
    lasting_bytes: int = 0
    leftover_bytes: int = 0
    native_bytes: int | None = keyed("native_bytes")
    step_served: float | None = None

    def closing(self) -> str:
        """Returns the share of requests that it served, or why there was none."""
        served = self.served + self.dynamic + self.reusable
        if served:
            return f"{served / (served + self.fallback):.1%} of requests served by the arena"
        return f"no arena: {self.off_because}" if self.off_because else ""


def report_of(counters: Counters, step: Counters, plan: AddressPlan | None, **others: Any) -> ArenaReport:
    """Returns the report of an arena that was made.

    Args:
        counters: since the session began.
        step: of the step that ended last.
        plan: that it serves, or served last.
        others: fields that are not counted.
    """
    asked = step.from_arena + step.mismatched + step.dynamic_missed
    reserved = counters.reserved_bytes
    return ArenaReport(
        bytes=reserved,
        live_bytes=counters.live_bytes,
        peak_bytes=counters.peak_size,
        fragmentation=1 - counters.live_size / reserved if reserved else 0.0,
        peak_fragmentation=1 - counters.peak_size / reserved if reserved else 0.0,
        predicted_fragmentation=plan.predictions.fragmentation if plan else None,
        served=counters.planned,
        served_bytes=counters.planned_bytes,
        dynamic=counters.dynamic,
        dynamic_bytes=counters.dynamic_bytes,
        dynamic_missed=counters.dynamic_missed,
        reusable=counters.reusable,
        reusable_bytes=counters.reusable_bytes,
        fallback=counters.fallback,
        fallback_bytes=counters.fallback_bytes,
        lasting=counters.lasting,
        lasting_bytes=counters.lasting_bytes,
        leftover_bytes=counters.leftover_bytes,
        step_served=step.from_arena / asked if asked else None,
        **others,
    )
