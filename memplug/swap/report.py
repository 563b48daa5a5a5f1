"""The report of the swap list."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from memplug.session.technique_report import FollowerReport, keyed
from memplug.swap.plan.part import SwapPart
from memplug.swap.promises import Promises
from memplug.words import size


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapReport(FollowerReport):
    """Counts over all steps of the session, and promises of one step.

    Attributes:
        tensors: of the list in force; 0 without one.
        planned_bytes: that the list has away in a step.
        planned_state_bytes: of these, those of the model's and the optimizer's own, which leave as the step begins.
        peak_bytes: what the second step under the list took of the device; None before it.
        predicted_peak_bytes: what the list says of it; None without a list.
        stall_s: seconds for which that step's operators waited for copies; on the CPU, which makes them itself, the
            time that they took. None before it.
        predicted_stall_s: what the list says of it; None without a list.
        found, missed: tensors of the list that were, or were not, found in a step.
        repeated: steps that were followed by their requests alone (memplug/swap/native/repeated_step.h).
        released_bytes: that left the device.
        prefetched_bytes: that were copied back.
        cancelled: tensors that were used again before their memory was released.
        demanded: tensors that were used before they were to be back.
        refused: copies that a host or a device without room refused.
        passive, passive_bytes: tensors that left for no list, because a request for memory had failed.
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
        """Returns what was planned, and what left all the same."""
        return (
            f"swap list: {self.state}, {self.tensors} tensors planned, {self.passive} have left for requests that "
            f"failed ({size(self.passive_bytes)})",
        )


def report_of(
    state: str, off_because: str, part: SwapPart | None, promises: Promises | None, counters: dict[str, int]
) -> SwapReport:
    """Returns the report of a technique that was made.

    Args:
        off_because: "" while it may have a part in force.
        part: in force.
        counters: of the native core, by the names of fields and others.
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
