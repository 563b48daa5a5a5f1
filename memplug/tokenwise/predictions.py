"""Compares the bytes that a step offloads with the plan's prediction.

The second step under each plan is compared. In the first, memplug still learns which collectives' results no backward
asks for. A plan is made from one observed step. Later steps offload other amounts if the observation was wrong, or if
captures differ from the plan. Then the times that were predicted from these bytes are wrong too. In a mixture of
experts the amounts differ from step to step: the routing decides how many rows an expert gets.
"""

from __future__ import annotations

import logging
import weakref

from memplug.errors import coded
from memplug.profile.similarity import Program
from memplug.sizes import GIB
from memplug.tokenwise.engine.executor import Executor
from memplug.tokenwise.plan.decisions import Decisions

log = logging.getLogger("memplug")

TOLERANCE = 0.02


class Predictions:
    """The comparison of steps with their plan; called at the end of every step.

    Attributes:
        expected_bytes: predicted bytes of the last compared step; None until a step under this plan was compared.
        offloaded_bytes: bytes that the last compared step offloaded; None until then.
    """

    def __init__(self, executor: Executor):
        self._executor = executor
        self._before = self._counts()
        self._begun: weakref.WeakValueDictionary[int, Decisions] = weakref.WeakValueDictionary()
        self._settled: weakref.WeakValueDictionary[int, Decisions] = weakref.WeakValueDictionary()
        self._warned = False
        self.expected_bytes: int | None = None
        self.offloaded_bytes: int | None = None

    def end_step(self, decisions: Decisions | None, program: Program, planned_from: Program | None) -> None:
        """Compare the step that ended with its plan.

        Compare the next step instead if this one was short of host memory, ran a region that the plan does not cover,
        or had inputs of other sizes than the step that the plan was made from. Warn only if every region ran exactly as
        in the step that the plan was made from, down to the sizes of all tensors.

        Args:
            decisions: the decisions in force since the step began; None if there were none, or the step tried a plan.
            program: the program that the step ran.
            planned_from: the program that the plan was made from.
        """
        before, self._before = self._before, self._counts()
        if decisions is None or planned_from is None or id(decisions) in self._settled:
            return
        if id(decisions) not in self._begun:
            self._begun[id(decisions)] = decisions
            self.expected_bytes = self.offloaded_bytes = None
            return
        offloaded, expected, short, unplanned, strayed = (
            now - then for now, then in zip(self._before, before, strict=True)
        )
        as_planned = not (short or unplanned) and self._executor.flow.share == 1.0
        if not as_planned or not program.same_sizes(planned_from):
            return
        if not strayed:
            self._settled[id(decisions)] = decisions
        if not strayed or self.expected_bytes is None:
            self.expected_bytes, self.offloaded_bytes = expected, offloaded
        if not strayed and abs(offloaded - expected) > TOLERANCE * max(offloaded, expected):
            self.warn(offloaded, expected)

    def warn(self, offloaded: int, expected: int) -> None:
        """Warn, once, that the plan's prediction was wrong."""
        if not self._warned:
            self._warned = True
            text = (
                "memplug: a step under a plan offloaded %.3f GiB instead of the predicted %.3f GiB: predicted times "
                "are off by as much. Results are right; report it unless shapes change from step to step"
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
