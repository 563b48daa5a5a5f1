"""The swap list's part of the session's report."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from memplug.session.technique_report import FollowerReport, keyed
from memplug.swap.plan.part import SwapPart
from memplug.swap.promises import Promises
from memplug.words import size


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapReport(FollowerReport):
    """Counts over all steps of the session, and predictions and measurements of one step under the list.

    Attributes:
        tensors: tensors of the list in force; 0 without one.
        planned_bytes: bytes that the list swaps in a step.
        planned_state_bytes: the part of these that belongs to the model or the optimizer, and is swapped as the
            step begins.
        peak_bytes: the most device bytes in use in the second step under the list; None before it.
        predicted_peak_bytes: the list's prediction of it; None without a list.
        stall_s: seconds that this step's operators waited for copies; on the CPU, which makes the copies itself,
            the time that they took. None before that step.
        predicted_stall_s: the list's prediction of it; None without a list.
        found, missed: tensors of the list that were found, or not found, in a step.
        repeated: steps in which memplug saw only the memory requests, since they repeated a step (repeated_step.h).
        released_bytes: bytes released on the device.
        prefetched_bytes: bytes copied back.
        cancelled: tensors that were used again before their memory was released.
        demanded: tensors that were used before the list was to prefetch them.
        refused: copies that failed because the host or the device had no room.
        passive, passive_bytes: tensors that no list named, and that were offloaded because a request for memory had
            failed.
    """

    prefix: ClassVar[str] = "swap_"

    tensors: int = 0
    planned_bytes: int = 0
    planned_state_bytes: int = 0
    peak_bytes: int | None = None
    predicted_peak_bytes: int | None = keyed("predicted_swap_peak_bytes")
    stall_s: float | None = None
    predicted_stall_s: float | None = keyed("predicted_swap_stall_s")
    found: int = 0
    missed: int = 0
    repeated: int = 0
    released_bytes: int = 0
    prefetched_bytes: int = 0
    cancelled: int = 0
    demanded: int = 0
    refused: int = 0
    passive: int = 0
    passive_bytes: int = 0

    def explain(self, peak_bytes: int | None) -> tuple[str, ...]:
        """Return what was planned, and what was offloaded for requests that failed."""
        return (
            f"swap list: {self.state}, {self.tensors} tensors planned, {self.passive} offloaded because a request "
            f"failed ({size(self.passive_bytes)})",
        )


def report_of(
    state: str, off_because: str, part: SwapPart | None, promises: Promises | None, counters: dict[str, int]
) -> SwapReport:
    """Return the report of a technique.

    Args:
        state: value of its state.
        off_because: why it is off; "" while it may have a part in force.
        part: the part in force.
        promises: predictions of that part, compared with a step.
        counters: counts of the native core; some have names of fields.
    """
    return SwapReport(
        state=state,
        off_because=off_because or (part.impossible if part else "") or None,
        tensors=len(part.targets) if part else 0,
        planned_bytes=part.swapped_bytes if part else 0,
        planned_state_bytes=part.state_bytes if part else 0,
        peak_bytes=promises.peak_bytes if promises else None,
        predicted_peak_bytes=part.predicted_peak_bytes if part else None,
        stall_s=promises.stall_s if promises else None,
        predicted_stall_s=part.predicted_stall_s if part else None,
        **{each.name: counters[each.name] for each in fields(SwapReport) if each.name in counters},
    )
