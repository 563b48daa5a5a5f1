"""Whether a plan offloads as many bytes as predicted: the second step under each is compared. In the
first, regions find out which results of collectives no backward asks for.

A plan is made from one observed step. What it then moves differs where the observation was wrong, or what is captured
is not what was planned, and times that were predicted from bytes differ with it. The steps of a mixture differ by
themselves: where the tokens go decides how many rows an expert has.
"""

from __future__ import annotations

import logging

from memplug.errors import coded
from memplug.profile.similarity import Program
from memplug.sizes import GIB
from memplug.tokenwise.engine.executor import Executor
from memplug.tokenwise.plan.decisions import Decisions

log = logging.getLogger("memplug")

TOLERANCE = 0.02


class Predictions:
    """Called at the end of every step.

    Attributes:
        expected_bytes, offloaded_bytes: of the last step that was compared; None so far.
    """

    def __init__(self, executor: Executor):
        self._executor = executor
        self._before = self._counts()
        self._compared: Decisions | None = None
        self._is_settled = False
        self._warned = False
        self.expected_bytes: int | None = None
        self.offloaded_bytes: int | None = None

    def end_step(self, decisions: Decisions | None, program: Program, planned_from: Program | None) -> None:
        """A step is over that ran `program`, by `decisions` from its beginning; None: by none, or by some only tried.

        One that was short of host memory, or had a region that no plan knows, or was given more or less than the step
        that the plan was made from, says nothing of the plan: the next one is compared. Only where every region did the
        very same as in that step, to the sizes of all tensors, is a plan blamed.
        """
        if self._is_settled and decisions is self._compared:
            return
        before, self._before = self._before, self._counts()
        if decisions is None or planned_from is None:
            return
        if decisions is not self._compared:
            self._compared, self._is_settled = decisions, False
            self.expected_bytes = self.offloaded_bytes = None
            return
        offloaded, expected, short, unplanned, strayed = (
            now - then for now, then in zip(self._before, before, strict=True)
        )
        as_planned = not (short or unplanned) and self._executor.flow.share == 1.0
        if not as_planned or not program.same_sizes(planned_from):
            return
        self._is_settled = not strayed
        if self._is_settled or self.expected_bytes is None:
            self.expected_bytes, self.offloaded_bytes = expected, offloaded
        if self._is_settled and abs(offloaded - expected) > TOLERANCE * max(offloaded, expected):
            self.warn(offloaded, expected)

    def warn(self, offloaded: int, expected: int) -> None:
        """Once: a plan was wrong."""
        if not self._warned:
            self._warned = True
            text = (
                "memplug: a step under a plan offloaded %.3f GiB, and was to offload %.3f: its predicted times are off "
                "by as much. Results are right; report it unless shapes change from step to step"
            )
            log.warning(coded("MP013", text), offloaded / GIB, expected / GIB)

    def _counts(self) -> tuple[int, ...]:
        executor = self._executor
        transfer = executor.transfer
        return (
            transfer.offloaded_total_bytes,
            executor.flow.expected_bytes,
            transfer.refused,
            executor.flow.unplanned,
            executor.flow.strayed,
        )
