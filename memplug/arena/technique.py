"""The arena as a technique: plans a program's addresses from a recorded step, and serves its requests at them.

waiting ──a program lasts──► recording ──► planning, beside training ──► serving
                                 ▲                                         │
                                 └──── too many requests not served ───────┘

A plan is amended, without a new recording, where blocks are freed later than in the recorded step, where dynamic
requests find too little room, where a few planned requests come with other sizes, and where inputs are larger.

The first step of a run allocates memory that lasts: the optimizer's state, and gradients if they stay from step to
step. Addresses from an earlier run do not cover these requests, since they were planned from a later step. So if such
addresses serve the first step, the optimizer is withheld in it (backward too if gradients stay): torch's allocator
serves the requests of withheld passes.
"""

from __future__ import annotations

import collections
import enum
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch.distributed as dist

from memplug.arena import planning
from memplug.arena.amending import MISMATCHED_SHARE, Shortfall, Shortfalls
from memplug.arena.arena import Arena, Counters
from memplug.arena.judge import mistakes_of
from memplug.arena.leftovers import LeftoverRoom
from memplug.arena.plan.part import AddressPlan
from memplug.arena.report import ArenaReport, report_of
from memplug.arena.tables import ArenaTables, tables_of
from memplug.beside import Beside
from memplug.block import ArenaConfig
from memplug.errors import ArenaError, LayoutError
from memplug.plans.schema import MemoryPlan
from memplug.profile.recorder import Detail
from memplug.profile.trace import Pass, Trace, without_gradients
from memplug.profile.varying import scales_as
from memplug.session.given import Given
from memplug.session.technique import Technique
from memplug.words import known, size

MISMATCHED_STEPS = 3  # after this many such steps in a row, memplug makes a new plan
DIFFERING_SHARE = 0.01  # two steps are alike if at most this share of their requests differ
MOST_RECORDED_STEPS = 8  # recorded for one plan, and compared for the requests that differ


class ArenaState(enum.Enum):
    """The states of the arena."""

    WAITING = "waiting"  # no program has repeated yet
    RECORDING = "recording"  # the next step is recorded, to plan from it
    PLANNING = "planning"  # training goes on meanwhile, served by torch's allocator
    SERVING = "serving"
    OFF = "off"


@dataclass(eq=False, slots=True)
class Addresses:
    """The addresses that serve one program.

    Attributes:
        plan: the arena's part of the plan.
        tables: the same plan, as the native arena reads it.
        source: origin of the plan, in words for the log; "" once the addresses have been installed.
        amended: how often the plan was amended for each kind of shortfall.
        gradients_stay: see `memplug.plans.schema.TrainingPart`.
    """

    plan: AddressPlan
    tables: ArenaTables
    source: str
    amended: Mapping[Shortfall, int] = field(default_factory=collections.Counter)
    gradients_stay: bool = False


class PlannedAddresses(Technique[Addresses]):
    """The arena's technique; its states are drawn at the top of this file.

    Args:
        config: the arena's section of the block.
        arena: the arena that serves.
        beside: the process beside training that plans.
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
        beside: Beside,
        tell: Callable[[str, int], None],
        folder: Path | None = None,
    ):
        self.plan: AddressPlan | None = None
        self.plans = self.amendments = 0
        self._config, self._arena, self._beside, self._tell, self._folder = config, arena, beside, tell, folder
        self._state = ArenaState.WAITING
        self._serving: Addresses | None = None
        # `Addresses.amended` of the plan that is being made; empty: a new plan
        self._amending: collections.Counter[Shortfall] = collections.Counter()
        self._recorded: list[Trace] = []  # for the plan that is wanted
        self._earlier: list[Trace] = []  # for the program's earlier plans
        self._steps = 0  # steps since the last withdrawal, or since remembered addresses were installed
        self._mismatched_steps = 0
        self._shortfalls = Shortfalls(arena)  # of the plan in force
        self._patience = 1  # `_steps` at which another new plan may be made; that plan sets this to 2 * `_steps`
        self._beginning = self._before = arena.counters()  # earlier sessions may have used the arena
        self.step = self._before.since(self._before)
        self._withheld: tuple[Pass, ...] = ()  # passes of the next step whose requests torch's allocator serves
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
        return cls(config, Arena(given.device.torch_device, config.checks), given.beside(), given.tell, folder)

    @property
    def state(self) -> ArenaState:
        """Return the present state; OFF once the technique is switched off."""
        return ArenaState.OFF if self.off_because else self._state

    @property
    def has_served_whole(self) -> bool:
        """Return whether the last step was served with no pass withheld; see `Technique`."""
        return self.state is ArenaState.SERVING and self.step.planned > 0 and not self._was_withheld

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
        return self.state is ArenaState.RECORDING or self._arena.serving

    def begin_step(self) -> None:
        """Start serving the step."""
        self._arena.begin_step(self._withheld)

    def end_step(self) -> None:
        """Stop serving until the next step begins, and read the counts of the step that ends.

        Raises:
            ArenaError: with checks, a stray write was found.
        """
        self._arena.end_step()
        counters = self._arena.counters()
        self.step, self._before = counters.since(self._before), counters
        self._was_withheld, self._withheld, self._is_first = bool(self._withheld), (), False
        self._steps += 1
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
        """Return new addresses: for the recorded step, or amended ones if blocks were freed late; else None.

        Raises:
            LayoutError: no planner found addresses that the judge accepts.
        """
        if self._beside.is_busy:
            return self._made()
        if self._state is ArenaState.WAITING:
            self._state = ArenaState.RECORDING
        elif self._state is ArenaState.RECORDING and trace is not None:
            return self._take(trace)
        # a step with withheld passes says nothing about the plan
        elif self._state is ArenaState.SERVING and not self._was_withheld:
            if self._room.end_step(self.step, self._serving.plan, self._serving.tables):
                self._mismatched_steps = 0
                return None
            if found := self._shortfalls.end_step(self.step):
                return self._amend(*found)
            if self._departs():
                self._tell(f"arena: {self._departure()}; making a new plan", logging.INFO)
                self._state = ArenaState.RECORDING
        return None

    def judge(self, part: Addresses) -> str:
        """Return the first mistake that the judge finds, or ""."""
        return next(mistakes_of(part.plan), "")

    def install(self, part: Addresses) -> None:
        """Serve requests at these addresses from the next step on.

        Raises:
            ArenaError: the device has too little memory for the arena.
        """
        self._beside.stop()
        self._arena.serve(part.tables)
        self._room.begin()
        if not part.amended:
            self._shortfalls = Shortfalls(self._arena)
        self._shortfalls.begin(part.plan, part.tables, part.amended)
        self._has_served = False
        if not part.source:
            self._steps, self._mismatched_steps, self._patience = 0, 0, 1
        if self._is_first:
            self._withheld = (Pass.OPTIMIZER, Pass.BACKWARD) if part.gradients_stay else (Pass.OPTIMIZER,)
        self._serving, self._state, self.plan = part, ArenaState.SERVING, part.plan
        problem, promised = part.plan.problem, part.plan.predictions
        self._tell(
            f"arena: {size(promised.arena_bytes)} for {problem.requests:,} requests, the largest "
            f"{size(problem.largest_bytes)}, efficiency {known(part.plan.efficiency, '{:.2%}'.format)}, "
            f"{part.source or 'remembered'}",
            logging.INFO if part.source and not part.amended else logging.DEBUG,
        )
        part.source = ""

    def withdraw(self) -> None:
        """Stop serving; requests go to torch's allocator until the next install."""
        self._beside.stop()
        self._arena.close()
        self._recorded.clear()
        self._earlier.clear()
        self._state, self._serving, self._withheld = ArenaState.WAITING, None, ()
        self._steps, self._mismatched_steps, self._patience = 0, 0, 1

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
        asked = self.step.from_arena + self.step.mismatched + self.step.dynamic_missed
        mismatched = self.step.mismatched > MISMATCHED_SHARE * asked
        self._mismatched_steps = self._mismatched_steps + 1 if mismatched else 0
        if self._mismatched_steps < MISMATCHED_STEPS or self._steps < self._patience:
            return False
        self._patience = 2 * self._steps
        self._mismatched_steps = 0
        return True

    def _departure(self) -> str:
        step = self.step
        return (
            f"{MISMATCHED_STEPS} steps in a row had requests that do not fit the plan; of "
            f"{step.from_arena + step.mismatched:,} requests in the last one, {step.unplanned:,} are not in the plan, "
            f"and {step.occupied:,} found their planned bytes in use"
        )

    def _take(self, trace: Trace) -> Addresses | None:
        """Plan from the later of two steps that are alike, since it shows which blocks outlived the step before.

        If requests depend on data, no two steps are alike: then several show how much the requests vary.
        """
        self._recorded.append(trace)
        recorded = self._recorded
        if len(recorded) < 2 or not (_alike(*recorded[-2:]) or len(recorded) >= MOST_RECORDED_STEPS):
            return None
        seen = [*self._earlier, *recorded][:-1]
        self._earlier, self._recorded = [*seen, trace][-MOST_RECORDED_STEPS:], []
        self._state, self._amending = ArenaState.PLANNING, collections.Counter()
        others = [other for other in seen if _alike(other, trace)] or recorded[:-1]
        config = self._config
        self._beside.begin(planning.planned, trace, others, config.planner, config.checks, self._folder)
        return self._made()

    def _amend(self, shortfall: Shortfall, plan: AddressPlan) -> Addresses | None:
        """Plan again for a changed problem, beside training."""
        self._amending = collections.Counter(self._serving.amended) + collections.Counter([shortfall])
        self._beside.begin(planning.amended, plan, self._config.planner)
        return self._made()

    def _made(self) -> Addresses | None:
        """Return the new addresses once planning is done; else None."""
        if not self._beside.is_done:
            return None
        try:
            plan, tables = self._beside.take()
        except (ArithmeticError, AssertionError, LookupError, MemoryError, TypeError, ValueError) as error:
            raise LayoutError(  # a planner must not end a training
                f"planning failed: {type(error).__name__}: {error}", "Please report it, with a trace.", code="MP016"
            ) from error
        self.plans += not self._amending
        self.amendments += bool(self._amending)
        return Addresses(plan, tables, f"planned in {plan.solution.seconds:.1f} s", self._amending)


def _alike(one: Trace, other: Trace) -> bool:
    """Return whether two steps make the same requests, in any order, except for at most `DIFFERING_SHARE` of them.

    Requests of validations are not compared, nor are sizes if the steps have inputs of other sizes.
    """
    scales = one.fingerprint.input_sizes != other.fingerprint.input_sizes
    if scales and not scales_as(one, other):
        return False
    counts = []
    for trace in (one, other):
        rows = trace.requests[~without_gradients(trace)]
        kinds = rows[["malloc_operator" if scales else "nbytes", "malloc_layer"]].tolist()
        names = [trace.names[name] for name in trace.operators["name"].tolist()] if scales else []
        counts.append(collections.Counter((names[kind] if scales and kind >= 0 else kind, at) for kind, at in kinds))
    differing = (counts[0] - counts[1]).total() + (counts[1] - counts[0]).total()
    return differing <= DIFFERING_SHARE * max(counts[0].total(), counts[1].total())
