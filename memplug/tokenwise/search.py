"""GenPolicy: one observed step, then plans around the optimum, each tried for one step. The fastest that kept to its
memory on every rank is taken (Chameleon, section 4); without more trials the one by which all regions run as
without memplug, where it did.

Plans are made beside training, which goes on at the safest setting, by the lowest of the ranks that run the same; they
are tried from the step on at which they are there for all ranks.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from memplug.beside import Beside
from memplug.errors import coded
from memplug.profile.recorder import Detail
from memplug.profile.trace import Trace
from memplug.session.ranks import Ranks
from memplug.tokenwise import budgets, candidates, in_flight, planning
from memplug.tokenwise.agreement import is_agreed
from memplug.tokenwise.budgets import DeviceBudget
from memplug.tokenwise.engine.executor import Executor
from memplug.tokenwise.engine.region import Region
from memplug.tokenwise.plan import plain
from memplug.tokenwise.plan import solver as plan
from memplug.tokenwise.plan.decisions import Decisions

log = logging.getLogger("memplug")

PEAK_SLACK = 0.02  # by which a step's peak may exceed the predicted one


@dataclass(frozen=True, slots=True)
class Trial:
    """One step under one plan on one rank."""

    seconds: float
    fits: bool
    """The host had room for all that was to be swapped, and the device's peak grew by no more than was to be kept."""
    device_bytes: int
    """What the plan keeps on the device."""


def choose(trials: Sequence[Sequence[Trial]]) -> tuple[int, bool]:
    """The best plan, and whether it fits; the same on every rank.

    The slowest rank's time counts, and every rank must have kept to its memory. Where no plan did, the one that keeps
    the least on the device is the safest; between equals the earlier one, which is nearer to the predicted optimum.

    Args:
        trials: of each rank, in rank order, of each plan.
    """
    by_plan = list(zip(*trials, strict=True))
    fitting = [i for i, ranks in enumerate(by_plan) if all(trial.fits for trial in ranks)]
    if fitting:
        return min(fitting, key=lambda i: max(trial.seconds for trial in by_plan[i])), True
    return min(range(len(by_plan)), key=lambda i: max(trial.device_bytes for trial in by_plan[i])), False


class Search:
    """From the boundary at which GenPolicy begins to the decisions.

    Args:
        regions: all of the session's, at the safest setting.
        executor: which runs them; from now on with device times around every operator.
        observer: listens to the executor.
        ranks: that train the model.
        budget: of the device.
        beside: where plans are made.
        tries: how many plans to try; with none, or only one, the optimum is taken as it is.
        alpha: "memo": MEMO's one plan.
        is_relieved: another technique makes steps fit that no plan does, or says that none can.
        step_peak: largest allocation total of the device since it was called last, in bytes; None: unknown.
        step_trace: the last step that was recorded in detail, None where none was.
        room: bytes that a plan may keep on the device, beside a step at the safest setting with such a peak.
        keeps: whether plans may keep outputs on the device.

    Attributes:
        outcome: how it did, for people.
        fits: False: every plan that was tried needed more memory than it should have.
    """

    def __init__(
        self,
        regions: Sequence[Region],
        executor: Executor,
        observer: planning.Observer,
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
    ):
        self.keeps, self._room, self._budget, self._is_relieved = keeps, room, budget, is_relieved
        self.regions, self.executor, self.observer = regions, executor, observer
        self._tries, self._alpha = tries, alpha
        self.outcome = ""
        self.fits = True
        self._ranks, self._gather = ranks, ranks.gather
        self._step_peak, self._step_trace = step_peak, step_trace
        self._beside = beside
        self._task: candidates.Task | None = None  # while plans are made of what was observed
        self._decisions_of: Callable[[plan.TokenwisePlan], Decisions]
        self._candidates: list[Decisions] = []
        self._trials: list[Trial] = []
        self._refused = 0
        self._begun = 0.0
        self._warned = False
        executor.time_forwards(observer)
        for region in self.regions:
            region.native.peak = 0  # forwards in flight of this program, not of another
        step_peak()

    def begin_program(self) -> None:
        """The step's first forward with gradients begins: what comes before it is no part of the step's time."""
        self.executor.device.synchronize()
        self._begun = self.executor.device.now_s()
        self.executor.flow.peak_held_bytes = 0

    def end_step(self) -> Decisions | None:
        """A step of the program is over. None: nothing is decided yet, and the regions run the next plan."""
        self.executor.device.synchronize()
        seconds = self.executor.device.now_s() - self._begun
        peak_bytes = self._step_peak()
        if self._candidates:
            self._note(seconds, peak_bytes)
        elif not (self._task is not None or self._begin_planning(peak_bytes)) or not self._is_planned():
            return None
        if len(self._candidates) > max(1, len(self._trials)) and not self._is_out_of_the_way():
            self._refused = self.executor.transfer.refused
            planning.put(self._candidates[len(self._trials)], self.regions, self.executor)
            return None
        return self._choose()

    def stop(self) -> None:
        """Nothing is observed any more."""
        self.executor.time_forwards(None)
        self.observer.clear()
        self._beside.stop()

    @property
    def detail(self) -> Detail | None:
        """How the next step is to be recorded: the one that plans are made from in full, those that try them for their
        peaks.
        """
        if self._task is not None:
            return None
        return Detail.REQUESTS if self._candidates else Detail.TENSORS

    def _begin_planning(self, peak_bytes: int | None) -> bool:
        """The observed step is over; False: a rank ran no region in it, and the next is observed. Raises `BudgetError`
        on all ranks where one has to take more of the device than it may.
        """
        groups = planning.group_regions(self.regions, self.observer)
        self.observer.settle(is_agreed(self.regions, self._gather, self._ranks.members))
        described = planning.describe(groups, self.observer, self.executor) if groups else []
        step = self._step_trace() if peak_bytes is not None else None
        times = in_flight.times(step, self.regions, self.executor.buffers) if step is not None else None
        room_bytes = self._room(peak_bytes) if self.keeps else 0
        host_bytes = self.executor.pool.budget_bytes
        own = described, self._budget.of_plan(host_bytes, room_bytes, self.executor.buffers, times)
        task = candidates.agree(own, self._gather, max(1, self._tries), self._alpha)
        if not (groups or self._warned):
            self._warned = True
            text = "memplug: no region ran in the step to plan from, for example %s. Name modules that training runs"
            log.warning(coded("MP008", text), self.regions[0].name)
        if task is None:
            return False
        if not self._is_relieved:
            self._budget.require(peak_bytes, self._gather, self._ranks.members)
        total_bytes = budgets.peak_bytes(self.executor.device) if peak_bytes is None else peak_bytes
        self._decisions_of = functools.partial(
            planning.decisions_of,
            held_bytes=self.executor.flow.peak_held_bytes if task.budget.in_flight else None,
            groups=groups,
            observer=self.observer,
            observed_peak_bytes=total_bytes,
            full_recomputation_s=plan.full_recomputation(*own).step_s,
        )
        self._task = task
        self.executor.time_forwards(None)
        if task.solver == self._ranks.rank:
            self._beside.begin(candidates.solve, task)
        return True

    def _is_planned(self) -> bool:
        """Whether there are plans to try by now, for all ranks."""
        if not all(self._gather(not self._beside.is_busy or self._beside.is_done)):
            return False
        task, self._task = self._task, None
        solved = self._beside.take() if self._beside.is_busy else None
        # the one that solves may do so now
        solutions = candidates.choose(task, solved, functools.partial(self._gather, patient=True))
        self._candidates = [self._decisions_of(one) for one in solutions]
        self.executor.pool.reserve(max(one.host_bytes for one in solutions))
        self.stop()
        return True

    def _note(self, seconds: float, peak_bytes: int | None) -> None:
        decisions = self._candidates[len(self._trials)]
        fits = self.executor.transfer.refused == self._refused
        if peak_bytes is not None and decisions.peak_bytes is not None:
            budget_bytes = self._budget.nbytes
            most_bytes = decisions.peak_bytes * (1.0 + PEAK_SLACK)
            if budget_bytes is not None and decisions.peak_bytes <= budget_bytes:
                most_bytes = min(most_bytes, budget_bytes)
            fits = fits and peak_bytes <= most_bytes
        self._trials.append(Trial(seconds, fits, decisions.solution.device_bytes))

    def _is_out_of_the_way(self) -> bool:
        """All ranks tried to run as without memplug, and had the memory for it: nothing is faster."""
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
