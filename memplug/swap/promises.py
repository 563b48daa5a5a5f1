"""What a swap list promises of a step, beside what happens in one."""

from __future__ import annotations

import logging
from collections.abc import Callable

from memplug.errors import coded
from memplug.profile.trace import Trace
from memplug.swap.plan.part import SwapPart
from memplug.words import size

PEAK_SLACK = 0.02  # share by which a step may take more than predicted
STALL_SLACK = 0.05  # share of a step for which operators may wait beyond what was predicted


class Promises:
    """Of one list.

    Args:
        part: the list.
        tell: says something to the user at a level of `logging`, once.
        copies_itself: the processor makes the copies, which take no time of a link: nothing is predicted of them.

    Attributes:
        peak_bytes: of the device, in the step that was measured; None: there was none yet.
        stall_s: for which operators waited for copies in that step; where the processor makes them, their time. None:
            there was none yet, or the device is not done with it.
    """

    def __init__(self, part: SwapPart, tell: Callable[[str, int], None], copies_itself: bool):
        self.peak_bytes: int | None = None
        self.stall_s: float | None = None
        self._part, self._tell, self._copies_itself = part, tell, copies_itself

    def compare_peak(self, step: Trace) -> None:
        """A step under the list was recorded."""
        measured, predicted = int(step.live_bytes.max(initial=0)), self._part.predicted_peak_bytes
        self.peak_bytes = measured
        if measured > predicted * (1 + PEAK_SLACK):
            text = f"a step under the swap list took {size(measured)} of the device, and was to take {size(predicted)}"
            advice = "Results are right; report it unless shapes change from step to step"
            self._tell(coded("MP013", f"{text}. {advice}"), logging.WARNING)

    def compare_stall(self, measured_s: float | None) -> None:
        """Its operators waited so long for copies; None: that is not known yet."""
        self.stall_s = measured_s
        predicted_s = self._part.predicted_stall_s
        allowed_s = predicted_s + STALL_SLACK * self._part.predicted_step_s
        if measured_s is not None and measured_s > allowed_s and not self._copies_itself:
            text = (
                f"a step under the swap list waited {measured_s:.3g} s for copies, and was to wait {predicted_s:.3g} s"
            )
            advice = 'Raise "device_budget_gib" if the device has more'
            self._tell(coded("MP013", f"{text}. {advice}"), logging.WARNING)
