"""Warns once if a number for alpha swaps more rows than the link can copy in time, or than the host has room for.

The check never changes alpha. It times the second step: the first one loads kernels and registers host memory, which
takes longer than the forwards. From these times MEMO's program (section 4.1) gives two fractions: the largest that the
link hides behind each region's forward, and the largest that the host budget holds.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import floor
from statistics import median

from memplug.errors import coded
from memplug.session.ranks import Ranks
from memplug.tokenwise import planning
from memplug.tokenwise.budgets import DeviceBudget
from memplug.tokenwise.engine import operators
from memplug.tokenwise.engine.executor import Executor
from memplug.tokenwise.engine.region import Region
from memplug.tokenwise.engine.tape import Form, Tape
from memplug.tokenwise.plan import memo
from memplug.tokenwise.plan import solver as plan

log = logging.getLogger("memplug")

LAST_STEP = 10  # if a rank has run no region up to this step, the check gives up
SLACK = 0.01  # tolerance of the comparison: fractions from the times of one step are no more precise


class AlphaCheck:
    """Checks a number above 0 for alpha; all ranks call `end_step` at the end of the same steps.

    Args:
        alpha: the number; None: regions run by plans, or there are no regions, so there is nothing to check.
        budget: the device budget.
        regions: all regions of the session.
        executor: runs the regions.
        ranks: the ranks that train the model.

    Attributes:
        by_link: the largest fraction whose copies fit into each region's forward on every rank; None until the check
            has been made.
        by_host: the largest fraction that fits the host budget of every rank; None until the check has been made.
    """

    def __init__(
        self, alpha: float | None, budget: DeviceBudget, regions: Sequence[Region], executor: Executor, ranks: Ranks
    ):
        self.by_link: float | None = None
        self.by_host: float | None = None
        self._budget, self._regions, self._executor, self._ranks = budget, regions, executor, ranks
        self._alpha = alpha or 0.0
        self._observer = planning.StepObserver(executor.flow.is_large)
        self._steps = 0
        self._is_over = not self._alpha

    def end_step(self) -> None:
        """After the first step, start timing; later, compare alpha with the times of the step that ended."""
        if self._is_over:
            return
        self._steps += 1
        if self._steps == 1:
            self._executor.time_forwards(self._observer)
            return
        self._executor.device.synchronize()
        everyone = self._ranks.gather(self._fitting())
        known = all(everyone)
        self._is_over = known or self._steps == LAST_STEP
        if self._is_over:
            self.stop()
        if known:
            self.by_link, self.by_host = (min(fractions) for fractions in zip(*everyone, strict=True))
            self._compare(self.by_link, self.by_host)

    def stop(self) -> None:
        """End the check, and stop timing forwards."""
        self._is_over = True
        self._executor.time_forwards(None)
        self._observer.clear()

    def _fitting(self) -> tuple[float, float] | None:
        """Return the largest fractions that fit this rank's link and host; None if no region has run."""
        seconds = self._executor.device.seconds_between
        groups = planning.group_regions(self._regions, self._observer)
        if not groups:
            return None
        self._observer.settle(is_agreed=True)  # with a number for alpha all ranks make the same decisions
        described = planning.describe(groups, self._observer, self._executor)
        tapes = self._observer.tapes
        unhindered = [
            replace(
                region, forward_s=median(unhindered_s(tapes[member.name], seconds) for member in groups[region.key])
            )
            for region in described
        ]
        host_bytes = self._executor.pool.budget_bytes
        return fitting(unhindered, self._budget.of_plan(host_bytes, 0, self._executor.buffers))

    def _compare(self, by_link: float, by_host: float) -> None:
        too_much = [
            consequence
            for fraction, consequence in (
                (by_link, "the forward waits for copies"),
                (by_host, "rows without room on the host are recomputed"),
            )
            if self._alpha > fraction + SLACK
        ]
        if too_much and self._ranks.first:
            text = (
                "memplug: alpha %g asks for more than fits: the link hides %.2f of the rows behind the forward, the "
                'host budget holds %.2f. memplug does not change it, so %s. Set "alpha" to the smaller of the two, or '
                'to "memo" or "auto", which choose a fraction for you'
            )
            log.warning(
                coded("MP017", text),
                self._alpha,
                _rounded_down(by_link),
                _rounded_down(by_host),
                " and ".join(too_much),
            )


def fitting(regions: Sequence[plan.PlannedRegion], budget: plan.Budget) -> tuple[float, float]:
    """Return the largest fractions that fit the link and the host (MEMO, section 4.1).

    Returns:
        (by_link, by_host): see `AlphaCheck`, here for one rank. Each is 0 if not even inputs and attention outputs fit.
    """
    largest = plan.solve(regions, budget, 1.0)
    return memo.fraction_of(regions, budget), largest.alpha if largest.inputs_swapped else 0.0


def unhindered_s(tape: Tape, seconds: planning.Seconds) -> float:
    """Return the seconds of a timed forward, less the time that it waited for copies.

    If these waits counted, a slow link would lengthen the forward until the copies fit into it. The forward may wait in
    three places: after a captured operator, since the capture may release an earlier region's memory; before an
    operator that writes in place; and at the end. In these places the time between two operators, a gap, is cut to the
    median of all other gaps. The gap after an exchange with other ranks counts in full, since there the forward waits
    for these ranks.
    """
    begin, end = tape.span
    gaps = [
        seconds(before, after) for (_, before), (after, _) in pairwise([(begin, begin), *tape.stamps, (end, end)])
    ]  # one before each operator, and one after the last
    may_wait = {len(tape.stamps)}
    for index, record in enumerate(tape.records):
        if record.written:
            may_wait.add(index)
        if operators.kind_of(record.func) is not None and record.form is not Form.EXCHANGE:
            may_wait.add(index + 1)
    usual_s = median([gap for index, gap in enumerate(gaps) if index not in may_wait] or [0.0])
    return seconds(begin, end) - sum(max(0.0, gaps[index] - usual_s) for index in may_wait)


def _rounded_down(fraction: float) -> float:
    """Round down to a hundredth, so that the fraction that the message advises fits."""
    return floor(100 * fraction + 1e-6) / 100
