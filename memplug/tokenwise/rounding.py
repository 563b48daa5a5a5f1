"""Reserves rounding buffers (MEMO, section 4.1) between two steps, as soon as their size is known.

Rounding buffers are device memory for prefetched tensors. Training with the arena needs none, since the arena plans
addresses for these tensors. A plan says how much each region swaps, so the buffers exist before the first step under
the plan. With a number for alpha there is no plan, and memplug takes the size from the first step. When a later step
swaps more, memplug enlarges the buffers before the next one. They do not shrink while the session is stable,
whichever program runs. Steps that a plan is made from, and steps that try plans, run without buffers.
"""

from __future__ import annotations

import logging

import torch

from memplug.tokenwise.budgets import DeviceBudget
from memplug.tokenwise.engine.executor import Executor
from memplug.tokenwise.plan.decisions import Decisions
from memplug.words import size

log = logging.getLogger("memplug")


class Rounding:
    """The rounding buffers of a session; called at the end of every step.

    Args:
        budget: the device budget.
        executor: reserves the buffers.
        planned: whether the session makes plans; if so, buffers are reserved only once it has one.
    """

    def __init__(self, budget: DeviceBudget, executor: Executor, planned: bool):
        self._budget, self._executor = budget, executor
        self._is_stable = not planned
        self._frame_bytes = 0  # size of one buffer when buffers were last reserved, or refused
        self._most_bytes = 0  # largest total of all buffers so far, which the device's reserved peak includes
        self._told = False

    def end_step(self, decisions: Decisions | None, stable: bool) -> None:
        """Reserve, enlarge or release the buffers for the next step.

        Args:
            decisions: the decisions of the regions from now on; None with a number for alpha.
            stable: whether the program is expected to repeat and no arena serves it.
        """
        flow = self._executor.flow
        if not (stable and self._is_stable):
            flow.largest_frame_bytes = 0  # this size was measured under another plan, or under none
        self._is_stable = stable
        planned_bytes = decisions.frame_bytes if decisions is not None else 0
        wanted_bytes = max(planned_bytes, flow.largest_frame_bytes) if stable else 0
        if wanted_bytes > self._frame_bytes or (self._frame_bytes and not stable):
            self._reserve(wanted_bytes, decisions.peak_bytes if decisions is not None else None)

    def peak_bytes(self, decisions: Decisions | None) -> int | None:
        """Return a step's predicted peak: `decisions.peak_bytes` plus the buffers reserved now; None: unknown."""
        known = decisions is not None and decisions.peak_bytes is not None
        return decisions.peak_bytes + self._executor.transfer.buffer_bytes if known else None

    def _reserve(self, frame_bytes: int, step_bytes: int | None) -> None:
        executor = self._executor
        total_bytes = executor.buffers * frame_bytes
        has_room = not frame_bytes or self._budget.holds_buffers(
            total_bytes, total_bytes - self._most_bytes, step_bytes
        )
        if has_room:
            with executor.hooks.own():
                executor.flow.reserve(0)  # releases the former buffers, so that their memory counts as free
                try:
                    has_room = executor.flow.reserve(frame_bytes)
                except torch.OutOfMemoryError:  # raised if the device is implemented in Python
                    has_room = False
            self._frame_bytes = frame_bytes
            self._most_bytes = max(self._most_bytes, executor.transfer.buffer_bytes)
        if not (has_room or self._told):
            self._told = True
            log.warning(
                "memplug: the device has no room for rounding buffers of %s: each prefetched tensor is allocated anew. "
                'Switch the arena on, which needs no such buffers, or lower "device_budget_gib": plans then leave room',
                size(total_bytes),
            )
