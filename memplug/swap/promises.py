"""Compares a swap list's predictions with a step that was measured under the list."""

from __future__ import annotations

import logging
from collections.abc import Callable

from memplug.errors import coded
from memplug.profile.trace import Trace
from memplug.swap.plan.part import SwapPart
from memplug.words import size

PEAK_SLACK = 0.02  # share by which a step's peak may exceed the prediction
STALL_SLACK = 0.05  # share of a step's time that operators may wait beyond the prediction


class Promises:
    """The predictions of one list, compared with a measured step.

    Args:
        part: the list.
        tell: logs one line for the user, at a level of `logging`.
        copies_itself: whether the device is a CPU, which makes the copies itself. There is no link then, so
            `compare_stall` does not warn.

    Attributes:
        peak_bytes: the most device bytes in use in the measured step; None before that step.
        stall_s: seconds that operators waited for copies in the measured step; if `copies_itself`, the time that the
            copies took. None before that step, and while the device still works on it.
    """

    def __init__(self, part: SwapPart, tell: Callable[[str, int], None], copies_itself: bool):
        self.peak_bytes: int | None = None
        self.stall_s: float | None = None
        self._part, self._tell, self._copies_itself = part, tell, copies_itself

    def compare_peak(self, step: Trace) -> None:
        """Compare the peak of a recorded step under the list; warn if it exceeds the prediction."""
        measured, predicted = int(step.live_bytes.max(initial=0)), self._part.predicted_peak_bytes
        self.peak_bytes = measured
        if measured > predicted * (1 + PEAK_SLACK):
            text = f"step peak {size(measured)} exceeds the swap list's prediction of {size(predicted)}"
            advice = "Results are right; report it unless shapes change from step to step"
            self._tell(coded("MP013", f"{text}. {advice}"), logging.WARNING)

    def compare_stall(self, measured_s: float | None) -> None:
        """Compare the seconds that a step waited for copies (None: unknown); warn if they exceed the prediction."""
        self.stall_s = measured_s
        predicted_s = self._part.predicted_stall_s
        allowed_s = predicted_s + STALL_SLACK * self._part.predicted_step_s
        if measured_s is not None and measured_s > allowed_s and not self._copies_itself:
            text = f"a step waited {measured_s:.3g} s for copies; the swap list predicted {predicted_s:.3g} s"
            advice = 'Raise "device_budget_gib" if the device has more'
            self._tell(coded("MP013", f"{text}. {advice}"), logging.WARNING)
