"""Computes how many device bytes a plan may keep, and notices when a plan keeps more than the device has room for.

Both account for the memory that the device's allocator or the arena reserves in addition to a step's tensors.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable

from memplug.device.reserved import Reserved
from memplug.errors import coded
from memplug.session.ranks import Ranks
from memplug.tokenwise import budgets
from memplug.tokenwise.budgets import DeviceBudget
from memplug.tokenwise.plan.decisions import Decisions
from memplug.words import size

SLACK = 0.02  # a step's reserved memory may exceed the budget by this share

log = logging.getLogger("memplug")


class Room:
    """The device memory for outputs that plans keep; all ranks call `is_short` at the end of the same steps.

    Args:
        budget: the device budget.
        ranks: the ranks that train the model.
        reserved: measures the memory that steps reserve in addition to their tensors.
    """

    def __init__(self, budget: DeviceBudget, ranks: Ranks, reserved: Reserved):
        self._budget, self._device, self._ranks, self._reserved = budget, budget.device, ranks, reserved
        self._retries = 0
        self._measured: weakref.WeakValueDictionary[int, Decisions] = weakref.WeakValueDictionary()
        self._warned = False
        self._agreed: Callable[[], float] | None = None

    def of_step(self, peak_bytes: int | None) -> int:
        """Return the device bytes that a plan may keep in addition to those of a step at the safest setting.

        Args:
            peak_bytes: peak of the allocated bytes in the step at the safest setting; None: unknown.
        """
        beside_bytes = 0 if peak_bytes is None else self._reserved.beside(peak_bytes)
        return self._budget.room_bytes(peak_bytes, beside_bytes)

    def is_short(self, decisions: Decisions | None) -> bool:
        """Return whether some rank's plan keeps more than its device has room for.

        The answer is one step old, since ranks agree on it while the next step runs.

        Args:
            decisions: the decisions of the step that ended; None: no plan was made for it.
        """
        if self._device.memory is None:
            return False
        before, self._retries = self._retries, budgets.allocation_retries(self._device)
        agreed = self._agreed
        # ranks may differ in whether there is a plan, if some recognised a program by its inputs: all vote
        is_lacking = decisions is not None and (self._measures(decisions) or self._retries > before)
        self._agreed = self._ranks.least(0.0 if is_lacking and self._lacks(decisions) else 1.0)
        return agreed is not None and agreed() < 1.0

    def _measures(self, decisions: Decisions) -> bool:
        """Return whether the step that ended reserved more than the budget.

        Only one step under each plan is measured: the first that the arena served from beginning to end. For all other
        steps, return False.
        """
        if id(decisions) in self._measured or decisions.peak_bytes is None:
            return False
        reserved_bytes = self._reserved.measure(decisions.peak_bytes)
        if reserved_bytes is None:
            return False
        self._measured[id(decisions)] = decisions
        is_over = reserved_bytes > (1 + SLACK) * self._budget.nbytes
        if is_over and not decisions.solution.device_bytes:
            self._warn(reserved_bytes)
        return is_over

    def _warn(self, reserved_bytes: int) -> None:
        """Warn, once, that no other plan would reserve less; say nothing if the budget is "auto"."""
        asked_gib = self._budget.asked_gib
        if self._warned or asked_gib == "auto":
            return
        self._warned = True
        text = (
            'memplug: steps reserve %s of the device, although "device_budget_gib" is %g and the plan keeps no outputs '
            "there; %s of the reserved memory are holes between long-lived tensors, in segments of torch's allocator. "
            "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which leaves no holes, or raise the budget"
        )
        log.warning(coded("MP012", text), size(reserved_bytes), asked_gib, size(self._device.memory.holes_bytes))

    def _lacks(self, decisions: Decisions) -> bool:
        if decisions.peak_bytes is None:
            return False
        kept_bytes = decisions.solution.device_bytes
        return self.of_step(decisions.peak_bytes - kept_bytes) < kept_bytes
