"""Moves a session along its stages, by what every step ran on all ranks (Chameleon, section 4: stage adjusting).

warm-up ──the same program, often enough──► gen-policy ──the best of some plans──► stable
   ▲                                            │                                    │
   └──────────── another program; one that has decisions already: straight to stable ─┘
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

RESTLESS_CHANGES = 20  # in a row, after which no program seems to last long enough to be planned for
LONGEST_HISTORY = 1000


@dataclass(frozen=True, slots=True)
class _StepBallot:
    """A step that all ranks vote on, while the next one may run already."""

    program: Program
    agreed: Callable[[], int]


@dataclass(frozen=True, slots=True, eq=False)
class Lasting:
    """A program under decisions, equal only to the very same ones; None: nothing is compared, or planned."""

    program: Remembered | None
    decisions: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lasting) and self.program is other.program and self.decisions is other.decisions

    def __hash__(self) -> int:
        return hash((id(self.program), id(self.decisions)))


class Adjuster:
    """See the module's text. Only a session whose alpha is to be planned tells it of steps.

    Args:
        profiler: the block's section.
        technique: whose parts programs run by; nothing of it is in force yet.
        stage: to begin with.
        ranks: who agree on every change.

    Attributes:
        decisions: in force; None while there is none, and while plans are tried.
        history: (step, stage, index of the program, why) of each change, the latest at the end.
        replans: how often a plan was made.
        warmup_steps: of a program like the one before, after which it is planned for.
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
        self._is_proven = False  # a watched step was of the program under the settings in force
        self._turned: tuple[Remembered, Remembered] | None = None  # a program, and what it became by a plan
        self._step = 0
        self._similar_steps = 0  # Algorithm 1's StableStep
        self._changes = 0  # since the last stable stage
        self._confirmed = True  # False: it goes on from an earlier run's plan, and no step has shown the program yet
        self.first: Program | None = None  # what the run's first step was like

    def resume(self, known: Sequence[tuple[Program, Any]], source: str, first: Program | None = None) -> list[Lasting]:
        """Go on from what an earlier run kept, before the first step: stable from here on, as long as that step is of
        the first of these programs. Called by all ranks, with as many.

        Args:
            known: programs, each with its decisions.
            source: of the first one, for people.
            first: what the first step may be like, too.
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
        """Step number `step`, from 1, is over on every rank; this is what it ran on this one.

        In stable the vote on a step is read a step later, so that training never waits for it (with one process there
        is nothing to wait for, and it is read as late); but at once on the first step of a run that goes on from an
        earlier one's plan. Where it tells of another program, the latest step is voted on
        at once: a program that came and went in a single step is gone before anything was changed for it.
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
        """How the next step is to be recorded.

        The step that plans are made from in full, and those that try them for their peaks; and the one before, so that
        what is alive from step to step is known by then.
        """
        if self.stage is Stage.GEN_POLICY:
            return self._technique.detail
        nearly = self._similar_steps >= self.warmup_steps
        return Detail.REQUESTS if self.stage is Stage.WARM_UP and nearly else None

    @property
    def lasting(self) -> Lasting | None:
        """What runs from step to step while stable; else None."""
        return self._lasting if self.stage is Stage.STABLE else None

    def stay(self, step: int, why: str) -> None:
        """Nothing is voted on any more: what runs now does from now on."""
        self._ballot = self._passing = None
        self._similar_steps = 0
        if self.stage is Stage.GEN_POLICY:
            self.stage = Stage.WARM_UP
        current = self.programs.current
        self.history.append((step, self.stage, current.index if current else 0, f"planning stopped: {why}"))

    def close(self) -> None:
        """The session is detached."""
        self.stage, self._ballot = Stage.DETACHED, None

    def tell(self, text: str, level: int = logging.INFO) -> None:
        """One line, on rank 0."""
        if self._ranks.first:
            log.log(level, "memplug: %s: %s", self.stage.value, text)

    # -- along the table -----------------------------------------------------------------------------------------------

    def _confirm(self, program: Program) -> None:
        """The first step of a run that goes on from a plan is over."""
        self._confirmed = True
        mask = self.programs.vote(program)
        if similar(program, self.first, *self.programs.limits):
            mask |= 1 << self.programs.current.index
        if self._follow(_StepBallot(program, self._ranks.vote(mask))) is StepOutcome.CHANGED:
            self._similar_steps = 1  # as in a first run

    def _call(self, program: Program) -> _StepBallot:
        mask, planned = self.programs.vote(program), self.stage is not Stage.WARM_UP
        if planned and not self._is_proven and self.programs.is_alike(program):
            mask |= ALIKE
        return _StepBallot(program, self._ranks.vote(mask))

    def _follow(self, ballot: _StepBallot) -> StepOutcome:
        """Take one step's program, as agreed by all ranks, along the table."""
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
        """A step that is another program by its operators alone, as soon as a plan is tried or adopted, and is the
        former one again as soon as that is withdrawn: the plan itself did that. It would do so for ever.
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
        if self.stage is Stage.STABLE:  # a borrowed plan is for what is gone before one of its own could be made
            stays = self._similar_steps > self.warmup_steps + self._tries
            return StepOutcome.CHANGED if seen.borrowed and stays else StepOutcome.STEADY
        return StepOutcome.SETTLED if self._similar_steps > self.warmup_steps else StepOutcome.STEADY

    def _propose(self) -> None:
        """To gen-policy: the next step is observed."""
        current, tries = self.programs.current, self._tries
        self._technique.may_keep = not self.programs.indifferent
        self._technique.propose(None)
        self._is_proven, self._turned = False, None
        seen = f"{_named(current)} ran {self._similar_steps} times"
        then = f", then up to {tries} plans are tried" if tries else ""
        self._note(Stage.WARM_UP, f"{seen}: one step with device times around every operator{then}")
        self._similar_steps = 0

    def _adopt(self) -> None:
        """To stable, on the best plan that was found."""
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
        """To stable, on the plan that the program has already."""
        if passing is not None and known.decisions is not None:
            passed, decisions = passing  # it came and went under this plan, and did no harm
            passed.decisions, passed.borrowed = decisions, True
        self._run(known, known.decisions)
        if known.decisions is None:
            self._note(before, f"{_named(known)} again, at the safest setting")
            return
        plan = "the plan that it came and went under" if known.borrowed else "its plan"
        self._note(before, f"{_named(known)} again, under {plan}")

    def _plan_anew(self, program: Program) -> None:
        """To warm-up, at the safest setting: no plan may keep what it keeps any longer."""
        self._ballot, self._passing = None, None
        self.programs.forget_plans()
        self.stage = after(Stage.STABLE, StepOutcome.CHANGED)
        self._start_over(self.programs.current, program, Stage.STABLE, "the device has less room than its plan needs")

    def _start_over(self, seen: Remembered, program: Program, before: Stage, change: str) -> None:
        """To warm-up, at the safest setting: another program, or one whose plan is good no longer."""
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
            return "it stays"
        if self.programs.vote(program) >> current.index & 1:
            return "another rank's step differs from those before"
        return difference(program, current.baseline)

    def _run(self, program: Remembered, decisions: Any) -> None:
        """Make a program the current one, which runs by these decisions."""
        if decisions is None:
            self._technique.withdraw()
        else:
            self._technique.install(decisions)
        self.decisions, self._lasting = decisions, Lasting(program, decisions)
        self.programs.enter(program)
        self._similar_steps, self._is_proven = 0, False
        self._changes = 0 if decisions is not None else self._changes

    # -- what it says --------------------------------------------------------------------------------------------------

    def _note(self, before: Stage, reason: str) -> None:
        """Keep a change, and say it: what a program does for the first time is news, unless there are ever more."""
        current, passage = self.programs.current, (before, self.stage)
        self.history.append((self._step, self.stage, current.index, reason))
        flickers = before is self.stage is Stage.WARM_UP or self.programs.made > MOST_PROGRAMS
        news = passage not in current.told and not flickers
        current.told.add(passage)
        self.tell(f"step {self._step}: {reason}", logging.INFO if news else logging.DEBUG)

    def _stop_comparing(self, change: str) -> None:
        """Programs keep changing, with sequence lengths or experts: treat every step as the same one from now on."""
        self.programs.indifferent = True
        if self._ranks.first:
            text = (
                "memplug: step %d: no program lasts long enough to be planned for, the last change was to %s. One plan "
                "is made for all steps from now on, which keeps nothing on the device. To have plans for each: raise "
                '"profiler": {"length_tolerance"}, or pad to fewer lengths'
            )
            log.warning(coded("MP009", text), self._step, change)

    def _stay_safest(self, program: Remembered) -> None:
        if self._ranks.first:
            text = (
                "memplug: step %d: each plan for %s makes another program of it, whose operators differ though its "
                "inputs do not. No more plans are made for it: it stays at the safest setting, which swaps the inputs "
                'of regions and recomputes the rest. Raise "profiler": {"length_tolerance"}, or set '
                '"tokenwise": {"alpha"} to a number'
            )
            log.warning(coded("MP009", text), self._step, _named(program))


def _named(program: Remembered) -> str:
    operators = program.baseline.operators
    return f"program {program.index}" + ("" if operators is None else f" ({len(operators):,} operators)")
