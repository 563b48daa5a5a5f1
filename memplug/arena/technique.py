"""The arena as a technique: plans a program's addresses from a recorded step, and serves its requests at them.

waiting ──a program lasts──► recording ──► planning, beside training ──► serving
                                 ▲                                         │
                                 └──── too many requests not served ───────┘

A plan is amended, without a new recording, where blocks live at other times than in the recorded step, where dynamic
requests find too little room, where a few planned requests come with other sizes, and where inputs are larger.

Each program goes through these states by its own steps. The plans of programs that take turns share one reservation,
which is released only while a step runs a program without a plan.

The first step of a run allocates memory that lasts: the optimizer's state, and gradients if they stay from step to
step. Addresses from an earlier run do not cover these requests, since they were planned from a later step. So if such
addresses serve the first step, the optimizer is withheld in it (backward too if gradients stay): torch's allocator
serves the requests of withheld passes.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from memplug.arena import planning
from memplug.arena.amending import MISMATCHED_SHARE, Shortfall, Shortfalls, has_unknown_sizes
from memplug.arena.arena import Arena, Counters
from memplug.arena.judge import mistakes_of
from memplug.arena.leftovers import LeftoverRoom
from memplug.arena.plan.part import AddressPlan
from memplug.arena.report import ArenaReport, report_of
from memplug.arena.tables import tables_of
from memplug.arena.work import Addresses, AddressWork, ArenaState, alike
from memplug.beside import Beside
from memplug.block import ArenaConfig
from memplug.errors import ArenaError, LayoutError
from memplug.plans.schema import MemoryPlan
from memplug.profile.recorder import Detail
from memplug.profile.trace import Pass, Trace
from memplug.session.given import Given
from memplug.session.technique import Technique
from memplug.words import known, size

MISMATCHED_STEPS = 3  # after this many such steps in a row, memplug makes a new plan
MOST_RECORDED_STEPS = 8  # recorded for one plan, and compared for the requests that differ


class PlannedAddresses(Technique[Addresses]):
    """The arena's technique; its states are drawn at the top of this file.

    Args:
        config: the arena's section of the block.
        arena: the arena that serves.
        beside: makes a process beside training that plans.
        tell: logs one line for the user, at a level of `logging`.
        folder: the folder in which ranks with the same requests share addresses; None: each rank plans for itself.

    Attributes:
        plan: the plan in force, or the last one that was; None before the first.
        plans: number of plans made from a recorded step.
        amendments: number of amended plans.
        step: counts of the step that ended last.
    """

    name = AddressPlan.name
    part_type = AddressPlan
    mistakes_of = staticmethod(mistakes_of)
    report_type = ArenaReport
    serves = True

    def __init__(
        self,
        config: ArenaConfig,
        arena: Arena,
        beside: Callable[[], Beside],
        tell: Callable[[str, int], None],
        folder: Path | None = None,
    ):
        self.plan: AddressPlan | None = None
        self.plans = self.amendments = 0
        self._config, self._arena, self._beside, self._tell, self._folder = config, arena, beside, tell, folder
        self._key: Hashable = None
        self._works: dict[Hashable, AddressWork] = {}
        self._beginning = self._before = arena.counters()  # earlier sessions may have used the arena
        self.step = self._before.since(self._before)
        self._withheld: tuple[Pass, ...] = ()  # passes of the next step whose requests torch's allocator serves
        self._is_in_step = False
        self._has_served = False  # whether a step was served since the last install
        self._is_first = True  # whether the session's first step has not ended yet
        self._was_withheld = False  # whether the step that ended last had withheld passes
        self._room = LeftoverRoom(arena)

    @classmethod
    def make(cls, given: Given) -> PlannedAddresses:
        """Return the technique of a session.

        Raises:
            ArenaError: memplug cannot stand in front of this device's allocator.
        """
        config = given.config.arena
        has_others = dist.is_initialized() and dist.get_world_size() > 1
        folder = given.folder if has_others else None
        return cls(config, Arena(given.device.torch_device, config.checks), given.beside, given.tell, folder)

    @property
    def state(self) -> ArenaState:
        """Return the present state; OFF once the technique is switched off."""
        return ArenaState.OFF if self.off_because else self._work.state

    @property
    def _work(self) -> AddressWork:
        if self._key not in self._works:
            self._works[self._key] = AddressWork(self._beside(), self._arena)
        return self._works[self._key]

    @property
    def has_served_whole(self) -> bool:
        """Return whether the last step was served with no pass withheld, in an arena made for it; see `Technique`."""
        is_served = self.state is ArenaState.SERVING and self.step.planned > 0 and not self._was_withheld
        return is_served and self._arena.is_largest(self._work.serving.tables)

    @property
    def counters(self) -> Counters:
        """Return the counts since the session began, and the memory in use now."""
        return self._arena.counters().since(self._beginning)

    @property
    def native_bytes(self) -> int | None:
        """Return the bytes in use now outside of the arena; None except on CUDA."""
        return self._arena.native_bytes()

    # -- steps ---------------------------------------------------------------------------------------------------------

    @property
    def detail(self) -> Detail | None:
        """Return the detail with which to record the next step: requests if a plan is wanted, else None."""
        return Detail.REQUESTS if self.state is ArenaState.RECORDING else None

    @property
    def needs_places(self) -> bool:
        """Return whether requests must carry their places, by which the arena recognises them."""
        return self.state is ArenaState.RECORDING or any(each.serving for each in self._works.values())

    def begin_step(self) -> None:
        """Start serving the step."""
        self._is_in_step = True
        self._arena.begin_step(self._withheld)

    def end_step(self) -> None:
        """Stop serving until the next step begins, and read the counts of the step that ends.

        Raises:
            ArenaError: with checks, a stray write was found.
        """
        self._is_in_step = False
        self._arena.end_step()
        counters = self._arena.counters()
        self.step, self._before = counters.since(self._before), counters
        self._was_withheld, self._withheld, self._is_first = bool(self._withheld), (), False
        self._work.steps += 1
        self._has_served = self._arena.serving
        for count, how in (
            (self.step.written_freed, "after it was freed"),
            (self.step.written_beyond, "beyond its end"),
        ):
            if count:
                raise ArenaError(
                    f"{count} time{'s' if count > 1 else ''} in this step memory of the arena was written to {how}",
                    "Look for a kernel that writes outside of its tensors, or uses one that is freed: "
                    "`CUDA_LAUNCH_BLOCKING=1` and `compute-sanitizer` name it.",
                    code="MP027",
                )

    # -- the four verbs ------------------------------------------------------------------------------------------------

    def propose(self, trace: Trace | None) -> Addresses | None:
        """Return new addresses: for the recorded step, or amended ones where the plan falls short; else None.

        Raises:
            LayoutError: no planner found addresses that the judge accepts.
        """
        work = self._work
        if work.beside.is_busy:
            return self._made()
        if work.state is ArenaState.WAITING:
            work.state = ArenaState.RECORDING
        elif work.state is ArenaState.RECORDING and trace is not None:
            return self._take(trace)
        # a step with withheld passes says nothing about the plan
        elif work.state is ArenaState.SERVING and not self._was_withheld:
            if self._room.end_step(self.step, work.serving.plan, work.serving.tables):
                work.mismatched_steps = 0
                return None
            if found := work.shortfalls.end_step(self.step):
                return self._amend(*found)
            if self._departs():
                self._tell(f"arena: {self._departure()}; making a new plan", logging.INFO)
                work.state = ArenaState.RECORDING
        return None

    def judge(self, part: Addresses) -> str:
        """Return the first mistake that the judge finds, or ""."""
        return next(mistakes_of(part.plan), "")

    def install(self, part: Addresses) -> None:
        """Serve requests at these addresses from the next step on.

        Raises:
            ArenaError: the device has too little memory for the arena.
        """
        work = self._work
        if self._is_first:
            self._withheld = (Pass.OPTIMIZER, Pass.BACKWARD) if part.gradients_stay else (Pass.OPTIMIZER,)
        if self._arena.serve(part.tables):
            self._room.begin()
            if self._is_in_step:
                self._arena.begin_step(self._withheld)
        self.plan = part.plan
        if part is work.serving:  # the program is back
            return
        if work.serving is not None:
            self._arena.unload(work.serving.tables)
        work.beside.stop()
        self._has_served = False
        work.serving, work.state = part, ArenaState.SERVING
        if not part.amended:
            work.shortfalls = Shortfalls(self._arena)
        work.shortfalls.begin(part.plan, part.tables, part.amended)
        problem, promised = part.plan.problem, part.plan.predictions
        self._tell(
            f"arena: {size(promised.arena_bytes)} for {problem.requests:,} requests, the largest "
            f"{size(problem.largest_bytes)}, efficiency {known(part.plan.efficiency, '{:.2%}'.format)}, "
            f"{part.source}",
            logging.DEBUG if part.amended else logging.INFO,
        )

    def withdraw(self) -> None:
        """Stop serving; requests go to torch's allocator until the next install."""
        self._arena.close()
        self._withheld = ()

    def turn(self, key: Hashable) -> None:
        """Go on with the work for this program: see `Technique`."""
        self._key = key

    def forget(self, key: Hashable) -> None:
        """Drop a program's recorded steps and addresses."""
        work = self._works.pop(key, None)
        if work is not None:
            work.beside.stop()
            if work.serving is not None and key != self._key:
                self._arena.unload(work.serving.tables)

    def report(self) -> ArenaReport:
        """Return the arena's report; see `memplug.arena.report`."""
        return report_of(
            *(self.counters, self.step, self.plan, self.native_bytes, self._arena.native_reserved_bytes()),
            has_served=self._has_served,
            state=self.state.value,
            off_because=self.off_because or None,
            plans=self.plans,
            amendments=self.amendments,
        )

    # -- from run to run -----------------------------------------------------------------------------------------------

    def scales(self, part: Addresses) -> bool:
        """Return whether sizes of requests follow from those of the inputs: see `Technique`."""
        return len(part.plan.problem.terms) > 1

    def kept(self, plan: MemoryPlan) -> Addresses | None:
        """Return the addresses of a plan on disk; None if it has none."""
        own = AddressPlan.of(plan)
        if own is None:
            return None
        own = replace(own, problem=replace(own.problem, fingerprint=plan.fingerprint))
        stays = plan.training is not None and plan.training.gradients_stay
        return Addresses(own, tables_of(own), "as an earlier run kept it", gradients_stay=stays)

    def keep(self, part: Addresses, plan: MemoryPlan) -> MemoryPlan:
        """Return the plan with these addresses, and with the fingerprint of the step that they were planned from."""
        return replace(plan, fingerprint=part.plan.problem.fingerprint).with_part(part.plan)

    # -- plans ---------------------------------------------------------------------------------------------------------

    def _departs(self) -> bool:
        """Return whether several steps do not fit the plan, or one with inputs of sizes that were not recorded."""
        work = self._work
        step = self.step
        asked = step.from_arena + step.mismatched + step.dynamic_missed
        served_bytes = step.planned_bytes + step.dynamic_bytes + step.reusable_bytes
        missed_bytes = step.fallback_bytes - step.dynamic_missed_bytes
        is_large = bool(step.unplanned) and missed_bytes > MISMATCHED_SHARE * (served_bytes + step.fallback_bytes)
        mismatched = step.mismatched + step.exceeding > MISMATCHED_SHARE * asked or is_large
        work.mismatched_steps = work.mismatched_steps + 1 if mismatched else 0
        is_new = mismatched and has_unknown_sizes(work.serving.plan.problem, self._arena.inputs())
        if not (is_new or work.mismatched_steps >= MISMATCHED_STEPS) or work.steps < work.patience:
            return False
        work.patience = 2 * work.steps
        work.mismatched_steps = 0
        return True

    def _departure(self) -> str:
        step = self.step
        return (
            "steps had requests that do not fit the plan; of "
            f"{step.from_arena + step.mismatched:,} requests in the last one, {step.unplanned:,} are not in the plan, "
            f"and {step.occupied:,} found their planned bytes in use"
        )

    def _take(self, trace: Trace) -> Addresses | None:
        """Plan from the later of two steps that are alike, since it shows which blocks outlived the step before.

        If requests depend on data, no two steps are alike: then several show how much the requests vary.
        """
        self._work.recorded.append(trace)
        recorded = self._work.recorded
        before = [*self._work.earlier, *recorded][:-1]
        if not (before and alike(before[-1], trace)) and len(recorded) < MOST_RECORDED_STEPS:
            return None
        seen = [*self._work.earlier, *recorded][:-1]
        self._work.earlier, self._work.recorded = [*seen, trace][-MOST_RECORDED_STEPS:], []
        self._work.state, self._work.amending = ArenaState.PLANNING, collections.Counter()
        others = [other for other in seen if alike(other, trace)] or recorded[:-1]
        config = self._config
        how = config.planner, config.checks, self._folder, self.growth
        self._work.beside.begin(planning.planned, trace, others, *how)
        return self._made()

    def _amend(self, shortfall: Shortfall, plan: AddressPlan) -> Addresses | None:
        """Plan again for a changed problem, beside training."""
        work = self._work
        work.amending = collections.Counter(work.serving.amended) + collections.Counter([shortfall])
        work.beside.begin(planning.amended, plan, self._config.planner)
        return self._made()

    def _made(self) -> Addresses | None:
        """Return the new addresses once planning is done; else None."""
        if not self._work.beside.is_done:
            return None
        try:
            plan, tables = self._work.beside.take()
        except (ArithmeticError, AssertionError, LookupError, MemoryError, TypeError, ValueError) as error:
            raise LayoutError(  # a planner must not end a training
                f"planning failed: {type(error).__name__}: {error}", "Please report it, with a trace.", code="MP016"
            ) from error
        amended = self._work.amending
        self.plans += not amended
        self.amendments += bool(amended)
        return Addresses(plan, tables, f"planned in {plan.solution.seconds:.1f} s", amended)
