"""Searches for decisions in the stage gen-policy: observes one step, then tries plans around the optimum, one a step.

A search is one program's: it goes on whenever the program runs, whatever ran in between.

The search chooses the fastest plan that fits the memory of every rank (Chameleon, section 4). If the first plan runs
all regions as without memplug, and fits every rank's memory, no further plan is tried.

A process beside training makes the plans; training goes on at the safest setting. Among ranks that run the same
regions, the one with the largest step makes the plans for all. The first plan is tried once all ranks have their plans.
If steps differ in size, a plan is made for the largest that the program is made for: what a step has shown is scaled.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf, isfinite
from typing import Literal

from memplug.beside import Beside
from memplug.errors import coded
from memplug.profile.recorder import Detail
from memplug.profile.similarity import Program
from memplug.profile.trace import Trace
from memplug.session.ranks import Ranks
from memplug.tokenwise import budgets, candidates, in_flight, planning
from memplug.tokenwise.agreement import is_agreed
from memplug.tokenwise.budgets import DeviceBudget
from memplug.tokenwise.engine.executor import Executor
from memplug.tokenwise.engine.region import Region
from memplug.tokenwise.plan import plain, scaled
from memplug.tokenwise.plan import solver as plan
from memplug.tokenwise.plan.decisions import Decisions

log = logging.getLogger("memplug")

MOST_SCALE = 1.6  # a plan is made for steps of up to so many times the observed one's size; more if none is as large
PEAK_SLACK = 0.02  # share by which a step's peak may exceed the predicted one


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of one step under one plan on one rank."""

    seconds: float
    """Time of the step, scaled to that of the largest step that the plan is made for."""
    fits: bool
    """Whether the host refused no rows, and the device's peak stayed within the plan's prediction (plus `PEAK_SLACK`).
    The peak must also stay within the budget, unless even the prediction exceeds the budget."""
    device_bytes: int
    """Bytes that the plan keeps on the device."""


@dataclass(frozen=True, slots=True)
class _Measured:
    """The measurements of one step of the program on this rank.

    Attributes:
        phase: `PlanSearch._phase` when the step ran.
        observer: has the step's tapes, if it was observed.
        seconds: time of the step.
        peak_bytes: peak of the allocated bytes; None: unknown.
        held_bytes: peak of the bytes of regions' saved tensors in backward.
        refused: number of tensors that the host had no memory for.
        trace: the last step that was recorded in detail; None if there is none.
        scale: size of the largest step that the plan is made for, over that of the measured one; at least 1.
    """

    phase: int
    observer: planning.StepObserver
    seconds: float
    peak_bytes: int | None
    held_bytes: int
    refused: int
    trace: Trace | None
    scale: float


def choose(trials: Sequence[Sequence[Trial]]) -> tuple[int, bool]:
    """Return the index of the best plan, and whether it fits; the same on every rank.

    A plan fits if its trial fits on every rank. Its time is that of its slowest rank. The best plan is the fastest that
    fits. If no plan fits, the best is the one that keeps the fewest bytes on the device. If two plans are equally good,
    the earlier one wins: it is nearer to the predicted optimum.

    Args:
        trials: for each rank, in rank order, the trial of each plan.
    """
    by_plan = list(zip(*trials, strict=True))
    fitting = [i for i, ranks in enumerate(by_plan) if all(trial.fits for trial in ranks)]
    if fitting:
        return min(fitting, key=lambda i: max(trial.seconds for trial in by_plan[i])), True
    return min(range(len(by_plan)), key=lambda i: max(trial.device_bytes for trial in by_plan[i])), False


class PlanSearch:
    """One search for decisions of one program, which begins with the program's stage gen-policy.

    Args:
        regions: all regions of the session, at the safest setting.
        executor: runs the regions; the search has it take device times around every operator.
        ranks: the ranks that train the model.
        budget: device budget.
        beside: runs the planner beside training.
        tries: how many plans to try; with 0 or 1 the search chooses the optimum untried.
        alpha: "auto", or "memo" for MEMO's one plan.
        is_relieved: whether another technique takes over if steps fit under no plan: that technique then makes steps
            fit, or raises an error.
        step_peak: returns the peak of the bytes allocated on the device since its last call; None: unknown.
        step_trace: returns the last step that was recorded in detail; None if there is none.
        room: returns the bytes that a plan may keep on the device, given the peak of a step at the safest setting.
        keeps: whether plans may keep outputs on the device.
        share_of: see `AgreedTechnique`.

    Attributes:
        observer: keeps the tapes of the step that plans are made from.
        outcome: the result of the search, in words.
        fits: False if none of the tried plans fits the memory of every rank.
    """

    def __init__(
        self,
        regions: Sequence[Region],
        executor: Executor,
        ranks: Ranks,
        *,
        budget: DeviceBudget,
        beside: Beside,
        tries: int,
        alpha: Literal["auto", "memo"],
        is_relieved: bool,
        step_peak: Callable[[], int | None],
        step_trace: Callable[[], Trace | None],
        room: Callable[[int | None], int],
        keeps: bool,
        share_of: Callable[[Program], float | None],
    ):
        self._share_of = share_of
        self.keeps, self._room, self._budget, self._is_relieved = keeps, room, budget, is_relieved
        self.regions, self.executor = regions, executor
        self.observer = planning.StepObserver(executor.flow.is_large)
        self._tries, self._alpha = tries, alpha
        self.outcome = ""
        self.fits = True
        self._ranks, self._gather = ranks, ranks.gather
        self._step_peak, self._step_trace = step_peak, step_trace
        self._beside = beside
        self._task: candidates.SolveTask | None = None  # set while the planner runs
        self._decisions_of: Callable[[plan.TokenwisePlan], Decisions]
        self._candidates: list[Decisions] = []
        self._trials: list[Trial] = []
        self._measured: dict[int, _Measured] = {}  # by step: the latest two, since votes may be read one step late
        self._phase = 0  # number of times that measurements changed how the next step of the program runs
        self._refused = self._observed = self._base_bytes = 0
        self._begun = 0.0
        self._warned = False
        for region in self.regions:
            region.native.peak = 0  # restart the count of forwards in flight for this program
        step_peak()

    def enter(self) -> None:
        """Prepare for a step of the program: regions are at the safest setting, or at that of the next plan to try."""
        tried = self._candidates[len(self._trials)] if self._candidates else None
        planning.hold_to(tried, self.executor)
        self._begun, self._refused = self.executor.device.now_s(), self.executor.transfer.refused
        if self._is_observing:
            self.observer = planning.StepObserver(self.executor.flow.is_large)
        self.executor.time_forwards(self.observer if self._is_observing else None)

    def leave(self) -> None:
        """Take no more times: the next step may run another program."""
        self.executor.time_forwards(None)

    @property
    def _is_observing(self) -> bool:
        return self._task is None and not self._candidates

    def begin_program(self) -> None:
        """Start the step's clock at its first forward with gradients: earlier work is no part of the step's time."""
        self.executor.device.synchronize()
        self._begun = self.executor.device.now_s()
        self.executor.flow.peak_held_bytes = 0

    def measure(self, step: int, program: Program) -> None:
        """Note what a step has shown, at its end; `advance` uses it once all ranks agree that it ran the program."""
        executor = self.executor
        share = self._share_of(program)
        executor.device.synchronize()
        self._measured[step] = _Measured(
            phase=self._phase,
            observer=self.observer,
            seconds=executor.device.now_s() - self._begun,
            peak_bytes=self._step_peak(),
            held_bytes=executor.flow.peak_held_bytes,
            refused=executor.transfer.refused - self._refused,
            trace=self._step_trace(),
            scale=max(1.0, 1.0 / share) if share else inf if self.regions and not program.size else 1.0,
        )
        while len(self._measured) > 2:
            del self._measured[min(self._measured)]
        self.enter()

    def advance(self, step: int) -> Decisions | None:
        """Process a step of the program, which all ranks ran under this search.

        Args:
            step: the number that `measure` was given.

        Returns:
            The decisions, or None while the search goes on. While it does, the regions run the next step by the next
            plan to try, or at the safest setting if there is no plan yet.
        """
        measured = self._measured.pop(step, None)
        if measured is None or measured.phase != self._phase:  # it ran before the votes on an earlier step were read
            return None
        if self._candidates:
            self._note(measured)
        elif not (self._task is not None or self._begin_planning(measured)) or not self._is_planned():
            return None
        self._phase += 1
        if len(self._candidates) > max(1, len(self._trials)) and not self._is_out_of_the_way():
            planning.put(self._candidates[len(self._trials)], self.regions, self.executor)
            return None
        return self._choose()

    def stop(self) -> None:
        """Stop planning for good."""
        self._measured.clear()
        self._beside.stop()

    @property
    def detail(self) -> Detail | None:
        """Return how the next step is to be recorded.

        The step that plans are made from is recorded in full. A step that tries a plan is recorded for its peak only.
        While the planner runs, no step is recorded, and the result is None.
        """
        if self._task is not None:
            return None
        return Detail.REQUESTS if self._candidates else Detail.TENSORS

    def _begin_planning(self, measured: _Measured) -> bool:
        """Start the planner once a step was observed.

        Returns:
            False if a rank ran no region in the step, so that the next step has to be observed.

        Raises:
            BudgetError: see `DeviceBudget.require`.
        """
        observer, peak_bytes = measured.observer, measured.peak_bytes
        scale = measured.scale if isfinite(measured.scale) else 1.0  # an empty step: another rank's step counts
        self._observed += 1
        groups = planning.group_regions(self.regions, observer)
        observer.settle(is_agreed(self.regions, self._gather, self._ranks.members))
        described = planning.describe(groups, observer, self.executor) if groups else []
        described = [scaled.region(each, scale) for each in described]
        step = measured.trace if peak_bytes is not None else None
        times = in_flight.times(step, self.regions, self.executor.buffers) if step is not None else None
        times = scaled.in_flight(times, scale) if times is not None else None
        self._base_bytes = step.base_bytes if step is not None else 0
        if peak_bytes is not None:
            peak_bytes = scaled.peak_bytes(peak_bytes, self._base_bytes, scale)
        room_bytes = self._room(peak_bytes) if self.keeps else 0
        host_bytes = self.executor.pool.budget_bytes
        own = described, self._budget.of_plan(host_bytes, room_bytes, self.executor.buffers, times)
        is_ready = bool(groups) or not self.regions
        tries, most_scale = max(1, self._tries), MOST_SCALE * self._observed
        task = candidates.agree(
            own, self._gather, tries, self._alpha, is_ready=is_ready, scale=measured.scale, most_scale=most_scale
        )
        if not (is_ready or self._warned):
            self._warned = True
            text = (
                "memplug: no region ran in the step to plan from (the first region is %s). Name modules that training "
                'runs in "tokenwise.regions"'
            )
            log.warning(coded("MP008", text), self.regions[0].name)
        if task is None:
            return False
        if not self._is_relieved:
            self._budget.require(measured.peak_bytes, self._gather, self._ranks.members)
        total_bytes = budgets.peak_bytes(self.executor.device) if peak_bytes is None else peak_bytes
        self._decisions_of = functools.partial(
            planning.decisions_of,
            held_bytes=ceil(scale * measured.held_bytes) if task.budget.in_flight else None,
            scale=scale,
            groups=groups,
            observer=observer,
            observed_peak_bytes=total_bytes,
            full_recomputation_s=plan.full_recomputation(*own).step_s,
        )
        self._task = task
        self._phase += 1
        if task.solver == self._ranks.rank:
            self._beside.begin(candidates.solve, task)
        return True

    def _is_planned(self) -> bool:
        """Return whether all ranks have plans to try. Once every planner is done, collect its plans."""
        if not all(self._gather(not self._beside.is_busy or self._beside.is_done)):
            return False
        task, self._task = self._task, None
        solved = self._beside.take() if self._beside.is_busy else None
        # a long timeout: without a planner process, a rank may still be solving in `take` while the others wait here
        solutions = candidates.choose(task, solved, functools.partial(self._gather, patient=True))
        self._candidates = [self._decisions_of(one) for one in solutions]
        del self._decisions_of  # lets go of the tapes
        self.executor.pool.reserve(max(one.host_bytes for one in solutions))
        self._beside.stop()
        return True

    def _note(self, measured: _Measured) -> None:
        decisions, peak_bytes = self._candidates[len(self._trials)], measured.peak_bytes
        fits, scale = not measured.refused, measured.scale if isfinite(measured.scale) else 1.0
        if peak_bytes is not None and decisions.peak_bytes is not None:
            peak_bytes = scaled.peak_bytes(peak_bytes, self._base_bytes, scale)
            budget_bytes = self._budget.nbytes
            most_bytes = decisions.peak_bytes * (1.0 + PEAK_SLACK)
            if budget_bytes is not None and decisions.peak_bytes <= budget_bytes:
                most_bytes = min(most_bytes, budget_bytes)
            fits = fits and peak_bytes <= most_bytes
        self._trials.append(Trial(scale * measured.seconds, fits, decisions.solution.device_bytes))

    def _is_out_of_the_way(self) -> bool:
        """Return whether the first plan fits and runs all regions as without memplug: no plan can be faster."""
        tried = len(self._trials) == 1 and plain.is_plain(self._candidates[0].solution)
        return tried and all(self._gather(self._trials[0].fits))

    def _choose(self) -> Decisions:
        if not self._trials:
            return self._candidates[0]
        trials = self._gather(self._trials)
        chosen, self.fits = choose(trials)
        seconds = [max(trial.seconds for trial in ranks) for ranks in zip(*trials, strict=True)]
        self.outcome = (
            f"plan {chosen + 1} of {len(seconds)} tried took {seconds[chosen]:.3f} s a step, "
            f"all of them {min(seconds):.3f} to {max(seconds):.3f} s"
        )
        return self._candidates[chosen]
