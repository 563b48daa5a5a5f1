"""When the arena serves, and from which plan: one for each program, made from a step that was recorded of it, or kept
by an earlier run.

waiting ──the program repeats──► recording ──► planning, beside training ──► serving ◄── a run goes on from a plan
   ▲                                 ▲                                         │
   └──── another program ────────────┴──── too many requests not served ───────┘

The first step of a run makes what lasts: the optimizer's state, and gradients where they stay from step to step. A plan
that is older knows nothing of them, so that those passes of that step are left to the native allocator.
"""

from __future__ import annotations

import collections
import enum
import logging
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from memplug.arena import planning
from memplug.arena.arena import Arena, Counters
from memplug.arena.tables import Tables, tables_of
from memplug.beside import Beside
from memplug.block import ArenaConfig
from memplug.errors import ArenaError, LayoutError
from memplug.plan.schema import MemoryPlan
from memplug.profile.trace import Pass, Trace
from memplug.show.words import size

log = logging.getLogger("memplug")

MOST_PLANS = 8
"""Remembered at a time, the latest: one for each sequence length, say."""

MISMATCHED_SHARE = 0.01  # of the requests of a step, above which it counts against the plan
MISMATCHED_STEPS = 3  # in a row, after which there is a new one
DIFFERING_SHARE = 0.01  # of the requests of two steps, up to which they are taken for the same program
MOST_RECORDED_STEPS = 8
MOST_AMENDMENTS = 16  # of a plan


class State(enum.Enum):
    """What the arena is doing."""

    WAITING = "waiting"  # for a program that repeats
    RECORDING = "recording"  # a step to plan from
    PLANNING = "planning"  # while training goes on, unserved
    SERVING = "serving"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class _Known:
    """What a program is served by."""

    plan: MemoryPlan
    tables: Tables
    amendments: int


class Serving:
    """The session tells it of the end of every step.

    Args:
        config: the block's section.
        arena: of the device that trains.
        warmup_steps: of a program, before it is recorded.
        beside: runs what plans.
        tell: the user, in one line of a level of logging.

    Attributes:
        state: see `State`.
        why: the arena is off; "" while it is not.
        plan: that it serves, or served last; None before there was one.
        plans: how many were made of a recorded step.
        amendments: how often a plan was amended.
        step: what it did in the step that ended last.
    """

    def __init__(
        self,
        config: ArenaConfig,
        arena: Arena,
        warmup_steps: int,
        beside: Beside,
        tell: Callable[[str, int], None],
    ):
        self.state, self.why = State.WAITING, ""
        self.plan: MemoryPlan | None = None
        self.plans = self.amendments = 0
        self.step = Counters()
        self._config, self._arena = config, arena
        self._warmup_steps, self._beside, self._tell = warmup_steps, beside, tell
        self._amendments = 0  # of the plan that is being made
        self._known: collections.OrderedDict[Hashable, _Known] = collections.OrderedDict()
        self._program: Hashable = None
        self._steps = 0  # of the program
        self._recorded: list[Trace] = []
        self._mismatched_steps = 0
        self._patience = 1  # steps of the program until there may be a new plan; doubles with each
        self._beginning = self._before = arena.counters()  # there may have been another session
        self._withheld: tuple[Pass, ...] = ()  # of the first step

    def resume(self, plans: Mapping[Hashable, MemoryPlan], program: Hashable, source: str) -> None:
        """Serve by plans that an earlier run kept, from the next step on.

        Args:
            plans: by program.
            program: to begin with.
            source: of the plans, for people.
        """
        for each, plan in plans.items():
            self._known[each] = _Known(plan, tables_of(plan), 0)
        self._program = program
        training = plans[program].training
        self._withheld = (Pass.OPTIMIZER, Pass.BACKWARD) if training.gradients_stay else (Pass.OPTIMIZER,)
        self._serve(self._known[program], logging.INFO, source)

    def turn_away(self) -> None:
        """The step that begins is not of the program that was expected: serve it nothing."""
        self._enter(None)

    @property
    def records(self) -> bool:
        """Whether the next step is to be recorded, with its requests."""
        return self.state is State.RECORDING

    @property
    def places(self) -> bool:
        """Whether the arena needs to know where in the program requests are made."""
        return self.state is State.RECORDING or self._arena.serving

    @property
    def counters(self) -> Counters:
        """Since the session began, and now."""
        return _difference(self._arena.counters(), self._beginning)

    def end_step(self, program: Hashable, trace: Trace | None) -> None:
        """A step is over; what follows is decided before the next one begins.

        Args:
            program: what runs, if it repeats and is to stay: equal for equal programs; None: it is not known yet.
            trace: of the step, if it was recorded.

        Raises:
            ArenaError: a stray write was found, in the mode that checks.
        """
        counters = self._arena.counters()
        self.step, self._before = _difference(counters, self._before), counters
        self._check(self.step)
        first, self._withheld = bool(self._withheld), ()
        if self.state is State.OFF:
            return
        if program != self._program:
            self._enter(program)
        self._steps += 1
        if self.state is State.WAITING and program is not None and self._steps > self._warmup_steps:
            self.state = State.RECORDING
        elif self.state is State.RECORDING and trace is not None:
            self._take(trace)
        elif self._beside.is_busy:
            self._adopt()
        elif first:
            pass  # it made what lasts, and says nothing of those that follow
        elif self.state is State.SERVING and not self._amend() and self._departs():
            self._tell(f"arena: {self._departure()}: a new plan is made", logging.INFO)
            self.state = State.RECORDING

    @property
    def native_bytes(self) -> int | None:
        """See `Arena.native_bytes`."""
        return self._arena.native_bytes()

    def pause(self) -> None:
        """A step is over: what is asked for from here until the next begins is memplug's own."""
        self._arena.end_step()

    def begin_step(self) -> None:
        """Called just before the next step starts."""
        self._arena.begin_step(self._withheld)

    def close(self, why: str) -> None:
        """Serve nothing any more."""
        self.state, self.why = State.OFF, why
        self._beside.stop()
        self._arena.close()
        self._recorded.clear()
        self._known.clear()

    # -- programs ------------------------------------------------------------------------------------------------------

    def _enter(self, program: Hashable) -> None:
        self._program, self._steps, self._mismatched_steps, self._patience = program, 0, 0, 1
        self._recorded.clear()
        self._beside.stop()
        self.state = State.WAITING
        known = self._known.get(program) if program is not None else None
        if known is None:
            self._arena.close()  # its memory is the native allocator's meanwhile
        else:
            self._known.move_to_end(program)
            self._serve(known, logging.DEBUG)

    def _departs(self) -> bool:
        asked = self.step.served + self.step.mismatched + self.step.dynamic_missed
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
            f"{MISMATCHED_STEPS} steps in a row had requests that the plan has no address for, the last one "
            f"{step.unplanned:,} that it does not know and {step.occupied:,} whose bytes were in use, of "
            f"{step.served + step.mismatched:,}"
        )

    # -- plans ---------------------------------------------------------------------------------------------------------

    def _take(self, trace: Trace) -> None:
        """Plan from the second of two steps that asked for the same: what the first left alive is known then."""
        self._recorded.append(trace)
        if len(self._recorded) < 2 or not (_alike(*self._recorded[-2:]) or self._tired):
            return
        self._recorded.clear()
        self.state = State.PLANNING
        self._plan(0, planning.planned, trace, self._config.planner, self._config.checks)

    @property
    def _tired(self) -> bool:
        return len(self._recorded) >= MOST_RECORDED_STEPS

    def _amend(self) -> bool:
        """Where blocks came back later than in the step that was recorded, and other requests found no idle bytes
        instead: a plan in which they last twice as long as they were seen to. Such are blocks that another thread
        frees, as backends of collectives do: now sooner, now later.
        """
        known, late, asked = self._known[self._program], self._arena.late(), self.step.served + self.step.mismatched
        strange = self.step.unplanned > MISMATCHED_SHARE * asked  # another program, of which nothing is to be learnt
        if not (late and self.step.occupied) or strange or known.amendments == MOST_AMENDMENTS:
            return False
        problem = known.plan.problem
        buffers, end = problem.buffers.copy(), int(problem.buffers["upper"].max())
        for row, other in known.tables.rows[np.array(late)]:
            lower, seen = int(buffers["lower"][row]), int(buffers["lower"][other]) + 1
            buffers["upper"][row] = max(min(2 * seen - lower, end), int(buffers["upper"][row]))
        longer = replace(problem, buffers=buffers)
        self._plan(known.amendments + 1, planning.amended, known.plan, longer, self._config.planner)
        return True

    def _plan(self, amendments: int, plan: Callable[..., tuple[MemoryPlan, Tables]], *arguments: Any) -> None:
        """Have a plan made of the current program, which has been amended so often."""
        self._amendments = amendments
        self._beside.begin(plan, *arguments)
        self._adopt()

    def _adopt(self) -> None:
        """Serve by the plan that was being made, if it is there."""
        if not self._beside.is_done:
            return
        amendments = self._amendments
        try:
            known = _Known(*self._beside.take(), amendments)
        except LayoutError as error:
            log.warning("memplug: goes on without the arena: %s", error)
            self.close(error.problem)
            return
        self.plans += not amendments
        self.amendments += bool(amendments)
        self._known[self._program] = known
        while len(self._known) > MOST_PLANS:
            self._known.popitem(last=False)
        seconds = known.plan.solution.seconds
        self._serve(known, logging.DEBUG if amendments else logging.INFO, f"planned in {seconds:.1f} s")

    def _serve(self, known: _Known, level: int, source: str = "remembered") -> None:
        plan = known.plan
        try:
            self._arena.serve(known.tables)
        except ArenaError as error:
            log.warning("memplug: goes on without the arena: %s", error)
            self.close(error.problem)
            return
        promised, self.plan, self.state = plan.predictions, plan, State.SERVING
        self._tell(
            f"arena: {size(promised.arena_bytes)} for {len(plan.problem):,} requests, the largest "
            f"{size(int(plan.problem.buffers['size'].max(initial=0)))}, fragmentation {promised.fragmentation:.2%}, "
            f"{source}",
            level,
        )

    def _check(self, step: Counters) -> None:
        for count, how in ((step.written_freed, "after it was freed"), (step.written_beyond, "beyond its end")):
            if count:
                raise ArenaError(
                    f"{count} time{'s' if count > 1 else ''} in this step memory of the arena was written to {how}",
                    "Look for a kernel that writes outside of its tensors, or uses one that is freed: "
                    "`CUDA_LAUNCH_BLOCKING=1` and `compute-sanitizer` name it.",
                )


def _alike(one: Trace, other: Trace) -> bool:
    """Whether two steps ask for the same, in any order, but for few requests; dynamic ones are not compared, nor those
    of a validation.
    """
    counts = []
    for trace in (one, other):
        without_gradients = [at for at, phase in enumerate(trace.phases) if phase.kind is Pass.NO_GRAD]
        left_out = trace.requests["dynamic"] | np.isin(trace.requests["malloc_phase"], without_gradients)
        rows = trace.requests[~left_out]
        counts.append(collections.Counter(rows[["nbytes", "malloc_layer"]].tolist()))
    differing = (counts[0] - counts[1]).total() + (counts[1] - counts[0]).total()
    return differing <= DIFFERING_SHARE * max(counts[0].total(), counts[1].total())


def _difference(after: Counters, before: Counters) -> Counters:
    """What happened in between; what is said to be now stays."""
    now = ("reserved_bytes", "live_bytes", "live_size", "peak_bytes", "peak_size")
    return Counters(
        **{
            name: getattr(after, name) - (0 if name in now else getattr(before, name))
            for name in Counters.__dataclass_fields__
        }
    )
