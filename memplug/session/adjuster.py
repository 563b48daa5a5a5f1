"""Changes a session's stage according to the program that all ranks ran (Chameleon, section 4: stage adjusting).

warm-up ──the same program, often enough──► gen-policy ──the best of some plans──► stable
   ▲                                            │                                    │
   └──────────── another program; straight to stable if that one has decisions ───────┘
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from memplug.block import ProfilerConfig
from memplug.errors import LayoutError, coded
from memplug.profile.recorder import Detail
from memplug.profile.similarity import Program, difference, similar
from memplug.session.programs import ALIKE, MOST_PROGRAMS, Programs, Remembered
from memplug.session.ranks import Ranks
from memplug.session.table import Stage, StepOutcome, after
from memplug.session.technique import AgreedTechnique

log = logging.getLogger("memplug")

RESTLESS_CHANGES = 20  # after this many returns to warm-up without a new plan, all steps count as one program
LONGEST_HISTORY = 1000


@dataclass(frozen=True, slots=True)
class _StepBallot:
    """This rank's vote on the program of a step; the next step may run before the votes are read.

    Attributes:
        program: the program that this rank ran.
        agreed: waits for the votes of all ranks, and returns their bitwise AND.
    """

    program: Program
    agreed: Callable[[], int]


@dataclass(frozen=True, slots=True, eq=False)
class Lasting:
    """A program and the decisions that it runs under; both are compared by identity.

    The program is None if alpha is a number, or without regions: the session then compares no steps.
    """

    program: Remembered | None
    decisions: Any

    def __eq__(self, other: object) -> bool:
        """Return whether `other` refers to the same program object and the same decisions object."""
        return isinstance(other, Lasting) and self.program is other.program and self.decisions is other.decisions

    def __hash__(self) -> int:
        """Return a hash of the two objects' identities."""
        return hash((id(self.program), id(self.decisions)))


class Adjuster:
    """Changes the stage, program and decisions of a session.

    If alpha is a number, or there are no regions, the technique makes no plans, and the session never calls `end_step`.

    Args:
        profiler: the block's "profiler" section.
        technique: the technique that decides how regions run; none of its parts is in force yet.
        stage: the stage to begin with.
        ranks: the ranks that agree on every change.

    Attributes:
        decisions: the technique's part in force; None while there is none, and while plans are tried.
        history: the last thousand changes, the latest at the end: (step, stage, index of the program, reason).
        replans: number of plans made.
        warmup_steps: number of similar steps in a row after which memplug plans for their program.
    """

    def __init__(
        self,
        profiler: ProfilerConfig,
        technique: AgreedTechnique[Any],
        stage: Stage,
        ranks: Ranks,
    ):
        self.stage = stage
        self.programs = Programs(profiler.length_tolerance, profiler.cosine_similarity)
        self.decisions: Any = None
        self.history: collections.deque[tuple[int, Stage, int, str]] = collections.deque(maxlen=LONGEST_HISTORY)
        self.replans = 0
        self.warmup_steps = profiler.warmup_steps
        self._tries, self._technique, self._ranks = profiler.policy_steps, technique, ranks
        self._lasting = Lasting(None, None)
        self._proposed: Any = None
        self._ballot: _StepBallot | None = None
        self._passing: tuple[Remembered, Any] | None = None
        self._is_proven = False  # True once a step with watched operators ran under the settings in force
        self._turned: tuple[Remembered, Remembered] | None = None  # (program, another one that ran under its plan)
        self._step = 0
        self._similar_steps = 0  # number of similar steps in a row: StableStep in Algorithm 1
        self._changes = 0  # number of returns to warm-up since decisions were last installed
        self._confirmed = True  # False after `resume`, until the first step has shown its program
        self.first: Program | None = None  # the program of the run's first step

    def resume(self, known: Sequence[tuple[Program, Any]], source: str, first: Program | None = None) -> list[Lasting]:
        """Resume from the plans of an earlier run, before the first step.

        The session is stable at once, and stays stable if the run's first step runs the program of `known[0]`. All
        ranks call this, with the same number of programs.

        Args:
            known: programs, each with its decisions.
            source: where the first plan was read from, for messages.
            first: the program of the earlier run's first step; None if that program is similar to `known[0]`. If this
                run's first step is similar to `first`, it counts as a step of `known[0]`.

        Returns:
            A `Lasting` for each program, in the order of `known`.
        """
        self.first = first or known[0][0]
        for program, decisions in known:
            self.programs.remember(program).decisions = decisions
        remembered = list(self.programs)
        self.stage, self._confirmed = Stage.STABLE, False
        self._run(remembered[0], remembered[0].decisions)
        self._note(Stage.WARM_UP, f"{self._technique.in_words(self.decisions)}, as an earlier run kept it in {source}")
        return [Lasting(each, each.decisions) for each in remembered]

    def end_step(self, step: int, program: Program) -> None:
        """Vote on the program of the step that ended, and act on the votes of all ranks.

        In the stage stable, a rank reads the votes on a step only when the next step ends, so that training does not
        wait for them; a single process does the same. If these votes show another program, the rank waits for the votes
        on the latest step too. If the latest step ran the former program again, no step runs under the other program's
        settings. In the other stages, and after a resumed run's first step, the rank always waits.

        Args:
            step: number of the step that ended, from 1.
            program: the program that this rank ran in it.
        """
        self._step = step
        if self.first is None:
            self.first = program
        if self._technique.has_lost_room():
            self._plan_anew(program)
            return
        if not self._confirmed:
            self._confirm(program)
            return
        if self.stage is Stage.STABLE:
            earlier, self._ballot = self._ballot, None
            if earlier is None or self._follow(earlier) is StepOutcome.STEADY:
                self._ballot = self._call(program)
                return
        self._follow(self._call(program))

    @property
    def detail(self) -> Detail | None:
        """Return the detail in which to record the next step; None to leave it unrecorded.

        Plans are made from one step, recorded in full. Each step that tries a plan is recorded for its peak of memory.
        The step before gen-policy is recorded too, to learn which memory outlives a step.
        """
        if self.stage is Stage.GEN_POLICY:
            return self._technique.detail
        nearly = self._similar_steps >= self.warmup_steps
        return Detail.REQUESTS if self.stage is Stage.WARM_UP and nearly else None

    @property
    def lasting(self) -> Lasting | None:
        """Return the current program and its decisions while the session is stable, else None."""
        return self._lasting if self.stage is Stage.STABLE else None

    def stay(self, step: int, why: str) -> None:
        """Stop voting for good, and keep the decisions in force.

        Args:
            step: number of the step that ended.
            why: the reason, for the history.
        """
        self._ballot = self._passing = None
        self._similar_steps = 0
        if self.stage is Stage.GEN_POLICY:
            self.stage = Stage.WARM_UP
        current = self.programs.current
        self.history.append((step, self.stage, current.index if current else 0, f"planning stopped: {why}"))

    def close(self) -> None:
        """Enter the stage "detached"."""
        self.stage, self._ballot = Stage.DETACHED, None

    def tell(self, text: str, level: int = logging.INFO) -> None:
        """Log one line, on rank 0 only.

        Args:
            text: the line, without the stage.
            level: level of `logging`.
        """
        if self._ranks.first:
            log.log(level, "memplug: %s: %s", self.stage.value, text)

    # -- changes of stage ----------------------------------------------------------------------------------------------

    def _confirm(self, program: Program) -> None:
        """Check, on all ranks, that the first step of a resumed run ran the program of its plan."""
        self._confirmed = True
        mask = self.programs.vote(program)
        if similar(program, self.first, *self.programs.limits):
            mask |= 1 << self.programs.current.index
        if self._follow(_StepBallot(program, self._ranks.vote(mask))) is StepOutcome.CHANGED:
            self._similar_steps = 1  # this step was the new program's first

    def _call(self, program: Program) -> _StepBallot:
        mask, planned = self.programs.vote(program), self.stage is not Stage.WARM_UP
        if planned and not self._is_proven and self.programs.is_alike(program):
            mask |= ALIKE
        return _StepBallot(program, self._ranks.vote(mask))

    def _follow(self, ballot: _StepBallot) -> StepOutcome:
        """Read the votes on a step, and change stage, program and decisions accordingly."""
        mask = ballot.agreed()
        seen = self.programs.agreed(mask)
        if seen is None:
            seen = self.programs.remember(ballot.program)
        self._note_turns(seen, bool(mask & ALIKE))
        event = self._judge(seen)
        before, self.stage = self.stage, after(self.stage, event)
        passing, self._passing = self._passing, None
        if event is StepOutcome.KNOWN:
            self._resume(seen, before, passing)
        elif event is StepOutcome.CHANGED:
            self._passing = (seen, self.decisions) if before is Stage.STABLE else None
            self._start_over(seen, ballot.program, before, self._change(seen, ballot.program))
        elif before is Stage.WARM_UP:
            self.programs.renew(ballot.program)
            if event is StepOutcome.SETTLED:
                self._propose()
        elif event is StepOutcome.SETTLED:
            self._adopt()
        elif before is Stage.STABLE and ballot.program.operators is not None:
            self._is_proven = True
        return event

    def _note_turns(self, seen: Remembered, alike: bool) -> None:
        """Detect turns: a plan changes the operators that steps run, so they count as steps of another program.

        Nothing but the operators changes, and they change back when the plan is withdrawn. The next plan would do the
        same, so after `MOST_TURNS` turns the program stays at the safest setting.

        Args:
            seen: the program of the step that ended.
            alike: True if on all ranks the step has inputs and autograd nodes like those of the current program.
        """
        current, turned = self.programs.current, self._turned
        if turned is not None and seen is turned[0]:
            self._turned = None
            if seen.note_turn(turned[1]):
                self._stay_safest(seen)
        elif alike and seen is not current and not seen.is_settled:
            self._turned = current, seen

    def _judge(self, seen: Remembered) -> StepOutcome:
        current = self.programs.current
        if current is None:
            self.programs.enter(seen)
        elif seen is not current:
            return StepOutcome.KNOWN if seen.is_settled else StepOutcome.CHANGED
        self._similar_steps += 1
        if self.stage is Stage.GEN_POLICY:
            self._proposed = self._technique.propose(None)
            return StepOutcome.STEADY if self._proposed is None else StepOutcome.SETTLED
        if self.stage is Stage.STABLE:
            # a borrowed plan is for a few steps; a program that keeps running gets a plan of its own
            stays = self._similar_steps > self.warmup_steps + self._tries
            return StepOutcome.CHANGED if seen.borrowed and stays else StepOutcome.STEADY
        return StepOutcome.SETTLED if self._similar_steps > self.warmup_steps else StepOutcome.STEADY

    def _propose(self) -> None:
        """Enter gen-policy: the next step is observed."""
        current, tries = self.programs.current, self._tries
        self._technique.may_keep = not self.programs.indifferent
        self._technique.propose(None)
        self._is_proven, self._turned = False, None
        seen = f"{_named(current)} ran {self._similar_steps} times"
        then = f", then tries up to {tries} plans" if tries else ""
        self._note(Stage.WARM_UP, f"{seen}: memplug times every operator of the next step{then}")
        self._similar_steps = 0

    def _adopt(self) -> None:
        """Enter stable, under the best of the plans that were tried."""
        current, decisions = self.programs.current, self._proposed
        if wrong := self._technique.judge(decisions):
            raise LayoutError(f"the judge refuses the plan: {wrong}", "Please report it, with a trace.", code="MP016")
        current.decisions, current.borrowed = decisions, False
        self.replans += 1
        self._run(current, decisions)
        self._technique.retain(one.decisions for one in self.programs if one.decisions is not None)
        technique = self._technique
        self._note(Stage.GEN_POLICY, "; ".join(filter(None, [technique.in_words(decisions), technique.outcome])))

    def _resume(self, known: Remembered, before: Stage, passing: tuple[Remembered, Any] | None) -> None:
        """Enter stable for a remembered program: under its plan, or for good at the safest setting."""
        if passing is not None and known.decisions is not None:
            passed, decisions = passing  # the program that ran for one step in between borrows the plan of that step
            passed.decisions, passed.borrowed = decisions, True
        self._run(known, known.decisions)
        if known.decisions is None:
            self._note(before, f"{_named(known)} again, at the safest setting")
            return
        plan = "another program's plan, as before" if known.borrowed else "its plan"
        self._note(before, f"{_named(known)} again, under {plan}")

    def _plan_anew(self, program: Program) -> None:
        """Return to warm-up at the safest setting: the device has less room than the plans rely on."""
        self._ballot, self._passing = None, None
        self.programs.forget_plans()
        self.stage = after(Stage.STABLE, StepOutcome.CHANGED)
        self._start_over(self.programs.current, program, Stage.STABLE, "the device has less room than its plan needs")

    def _start_over(self, seen: Remembered, program: Program, before: Stage, change: str) -> None:
        """Return to warm-up at the safest setting: the program is new, or its plan is no longer valid."""
        seen.decisions, seen.borrowed = None, False
        self._changes += 1
        self._run(seen, None)
        self.programs.renew(program)
        self._note(before, f"{_named(seen)} is planned for once it repeats: {change}")
        if self._changes == RESTLESS_CHANGES:
            self._stop_comparing(change)

    def _change(self, seen: Remembered, program: Program) -> str:
        current = self.programs.current
        if seen is current:
            return "it keeps running under another program's plan"
        if self.programs.vote(program) >> current.index & 1:
            return "another rank's step differs from those before"
        return difference(program, current.baseline)

    def _run(self, program: Remembered, decisions: Any) -> None:
        """Make a program the current one, and put its decisions into force."""
        if decisions is None:
            self._technique.withdraw()
        else:
            self._technique.install(decisions)
        self.decisions, self._lasting = decisions, Lasting(program, decisions)
        self.programs.enter(program)
        self._similar_steps, self._is_proven = 0, False
        self._changes = 0 if decisions is not None else self._changes

    # -- log lines -----------------------------------------------------------------------------------------------------

    def _note(self, before: Stage, reason: str) -> None:
        """Record a change in the history and log it.

        A program's first change from one stage to another is logged at INFO. All else is logged at DEBUG: repetitions,
        changes of program within warm-up, and changes after the first `MOST_PROGRAMS` programs.
        """
        current, passage = self.programs.current, (before, self.stage)
        self.history.append((self._step, self.stage, current.index, reason))
        flickers = before is self.stage is Stage.WARM_UP or self.programs.made > MOST_PROGRAMS
        news = passage not in current.told and not flickers
        current.told.add(passage)
        self.tell(f"step {self._step}: {reason}", logging.INFO if news else logging.DEBUG)

    def _stop_comparing(self, change: str) -> None:
        """Treat every step as the same program from now on, since sequence lengths or experts keep changing."""
        self.programs.indifferent = True
        if self._ranks.first:
            text = (
                "memplug: step %d: no program lasts long enough to be planned for; the last change: %s. From now "
                "on one plan serves all steps, and keeps nothing on the device. To plan for each program, raise "
                '"profiler": {"length_tolerance"}, or pad sequences to fewer lengths'
            )
            log.warning(coded("MP009", text), self._step, change)

    def _stay_safest(self, program: Remembered) -> None:
        if self._ranks.first:
            text = (
                "memplug: step %d: each plan for %s makes another program of it: its operators change although its "
                "inputs do not. memplug makes no more plans for it, and keeps it at the safest setting, which swaps "
                'the inputs of regions and recomputes the rest. Raise "profiler": {"length_tolerance"}, or set '
                '"tokenwise": {"alpha"} to a number'
            )
            log.warning(coded("MP009", text), self._step, _named(program))


def _named(program: Remembered) -> str:
    operators = program.baseline.operators
    return f"program {program.index}" + ("" if operators is None else f" ({len(operators):,} operators)")
