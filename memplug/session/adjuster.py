"""Changes the stages of programs according to the steps that all ranks ran (Chameleon, section 4: stage adjusting).

warm-up ──the program ran often enough──► gen-policy ──the best of some plans──► stable
   ▲                                                                               │
   └──────────────── the device has less room than the plan needs ─────────────────┘

Each program goes through the stages by its own steps, however many steps of other programs come between them. Between
two steps all ranks turn to the program that they expect (`memplug.session.order`). When a step begins, a rank may
recognise another program by the step's inputs, and turn to it by itself if no collective depends on that.

Steps that differ in nothing but sizes run programs of one family (`memplug.session.programs`). The warm-up of its first
program counts for all. A program for smaller steps is planned for once it has come often enough; until then its steps
run under the plan of the next larger one. So do all steps for good if ranks' steps have to run alike.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from memplug.block import ProfilerConfig
from memplug.errors import LayoutError
from memplug.profile.recorder import Detail
from memplug.profile.similarity import Program, difference, related
from memplug.session import families
from memplug.session.history import ProgramHistory, named
from memplug.session.lasting import Lasting, StepBallot
from memplug.session.lasting import lasting as lasting_of
from memplug.session.order import HORIZON_STEPS, Order
from memplug.session.programs import ALIKE, EVEN, FIRST_BELOW, FIRST_UNDER, FREE, SIMILAR, Programs
from memplug.session.ranks import Ranks
from memplug.session.remembered import Remembered
from memplug.session.table import Stage, StepOutcome, after
from memplug.session.taken import TakenProgram
from memplug.session.technique import AgreedTechnique


class Adjuster:
    """Changes the stages, programs and decisions of a session.

    If alpha is a number, or there are no regions, the technique makes no plans, and the session never calls `end_step`.

    Args:
        profiler: the block's "profiler" section.
        technique: the technique that decides how regions run; none of its parts is in force yet.
        stage: the stage to begin with.
        ranks: the ranks that agree on every change.

    Attributes:
        programs: the programs that the session remembers.
        history: the changes of their stages.
        replans: number of plans made.
        warmup_steps: number of further steps after which memplug plans for a program that it has seen once.
        taken: the program that this rank takes the step for that runs or is about to.
    """

    def __init__(self, profiler: ProfilerConfig, technique: AgreedTechnique[Any], stage: Stage, ranks: Ranks):
        self.programs = Programs(profiler.length_tolerance, profiler.cosine_similarity, self._forget)
        self.history = ProgramHistory(ranks)
        self.replans = 0
        self.warmup_steps = profiler.warmup_steps
        self._tries, self._technique, self._ranks = profiler.policy_steps, technique, ranks
        self._without_programs = stage  # the stage while there is no current program
        self._order = Order()
        self._ballot: StepBallot | None = None
        self._last: Remembered | None = None  # the program of the last step whose votes were read
        self._has_stopped = False
        self._turned: tuple[Remembered, Remembered] | None = None  # (program, another one that ran under its plan)
        self._unplanned_steps = 0  # number of steps in a row that ran programs in warm-up
        self._change = "none"  # how the latest program that ranks met differs from the one that they expected
        self._confirmed = True  # False after `resume`, until the first step has shown its program
        self._bound: set[int | str] = set()  # families in a step of which a rank was not free to turn by itself
        running = Lasting(None, None) if stage is Stage.STABLE else None
        self.taken = TakenProgram(technique, self.programs, running, is_shared=len(ranks.members) > 1)
        self.first: Program | None = None  # the program of the run's first step

    def resume(
        self, known: Sequence[tuple[Program, dict[str, Any], Any]], source: str, first: Program | None = None
    ) -> list[Lasting]:
        """Resume from the plans of an earlier run, before the first step.

        The session is stable at once, and stays stable if the run's first step runs the program of `known[0]`. All
        ranks call this, with the same number of programs.

        Args:
            known: programs, each with further arguments of `Programs.remember`, and with its decisions.
            source: where the first plan was read from, for messages.
            first: the program of the earlier run's first step; None if that program is similar to `known[0]`. If this
                run's first step is similar to `first`, it counts as a step of `known[0]`.

        Returns:
            A `Lasting` for each program, in the order of `known`.
        """
        self.first = first or known[0][0]
        for program, sizes, decisions in known:
            remembered = self.programs.remember(program, **sizes)
            remembered.stage, remembered.decisions = Stage.STABLE, decisions
            self._technique.turn(remembered)
            self._technique.install(decisions)
        self._confirmed = False
        first_of_all = self.programs.members(self.programs[0].family)[-1]  # has room for any of the family
        self.taken.expect(first_of_all)
        words = f"{self._technique.in_words(first_of_all.decisions)}, as an earlier run kept it in {source}"
        self.history.note(first_of_all, words)
        return [lasting_of(each) for each in self.programs]

    def begin(self, inputs: str) -> bool:
        """Turn to the program that begins with these inputs, on this rank alone; called when a step begins.

        Args:
            inputs: shapes and dtypes of the inputs of the step's first forward.

        Returns:
            Whether the step is taken for another program than expected.
        """
        if self.programs.current is None or self.programs.indifferent or self._has_stopped:
            return False
        return self.taken.recognise(inputs, notices_larger=self._confirmed)

    def end_step(self, step: int, program: Program) -> None:
        """Vote on the program of the step that ended, and act on the votes of all ranks.

        While all is calm (see `is_calm`), a rank reads the votes on a step only when the next step ends, so that
        training does not wait for them; a single process does the same. Else the rank waits for the votes.

        Args:
            step: number of the step that ended, from 1.
            program: the program that this rank ran in it.
        """
        self.history.step = step
        if self.first is None:
            self.first = program
        if self._technique.has_lost_room():
            self._plan_anew()
            return
        earlier, self._ballot = self._ballot, None
        if earlier is not None:
            self._follow(earlier)
        ballot = self._call(program)
        if self.is_calm:
            self._ballot = ballot
        else:
            self._follow(ballot)
        self._confirmed = True
        self.taken.expect(self._expected())

    @property
    def is_calm(self) -> bool:
        """Return whether the latest program that ranks agreed on is settled, and none that ran lately in gen-policy."""
        if not (self._confirmed and self._last is not None and self._last.is_settled):
            return False
        return not any(one.stage is Stage.GEN_POLICY and self._order.has_lately(one.index) for one in self.programs)

    @property
    def stage(self) -> Stage:
        """Return the stage of the program that the next step is expected to run."""
        current = self.programs.current
        if current is None or self._has_stopped:
            return self._without_programs
        return self.programs.covering(current).stage

    @property
    def decisions(self) -> Any:
        """Return the technique's part in force; None while there is none, and while plans are tried."""
        under = self.taken.under
        return under.decisions if under is not None else None

    @property
    def planned_from(self) -> Program | None:
        """Return the step that the part in force was made from; None while there is no part."""
        return self.taken.under.baseline if self.decisions is not None else None

    @property
    def detail(self) -> Detail | None:
        """Return the detail in which to record the step of the program that it is taken for; None for no record.

        Plans are made from one step, recorded in full. Each step that tries a plan is recorded for its peak of memory.
        The step before gen-policy is recorded too, to learn which memory outlives a step.
        """
        under = self.taken.under
        if under is None or under.stage is Stage.STABLE:
            return None
        if under.stage is Stage.GEN_POLICY:
            return self._technique.detail
        return Detail.REQUESTS if under.steps >= self.warmup_steps else None

    @property
    def lasting(self) -> Lasting | None:
        """Return the program that the next step is expected to run, with its decisions, if it is stable; else None."""
        current = self.programs.current
        return lasting_of(current) if current is not None else self.taken.running

    def growth(self, program: Program) -> float:
        """Return how much larger steps under the part in force may be than the step that ended; see `Technique`.

        Args:
            program: the step that ended.
        """
        under = self.taken.under
        if under is None or under in self.programs.members(under.family)[-1:]:
            return 1.0
        return max(1.0, (1.0 + self.programs.limits[0]) / (under.share(program) or 1.0))

    def is_live(self, lasting: Lasting) -> bool:
        """Return whether steps may run under this program with its decisions again."""
        known = list(self.programs)
        return lasting.program is None or (
            lasting.program in known and any(one.is_settled and one.decisions is lasting.decisions for one in known)
        )

    def wants_operators(self, most: int) -> bool:
        """Return whether to watch the operators of the step that begins.

        Args:
            most: how many steps of a stable program may run unwatched.
        """
        taken_for = self.taken.program
        is_known = taken_for is not None and taken_for.is_settled and self.is_calm and not self.programs.doubts
        return not is_known or taken_for.unwatched >= most

    def stay(self, step: int, why: str) -> None:
        """Stop voting for good, and keep the decisions in force.

        Args:
            step: number of the step that ended.
            why: the reason, for the history.
        """
        self._ballot = None
        stage, current = self.stage, self.programs.current
        self._without_programs = Stage.WARM_UP if stage is Stage.GEN_POLICY else stage
        self._has_stopped = self.taken.was_right = True
        index = current.index if current is not None else 0
        self.history.changes.append((step, self.stage, index, f"planning stopped: {why}"))

    def close(self) -> None:
        """Enter the stage "detached"."""
        self._without_programs, self._has_stopped, self._ballot = Stage.DETACHED, True, None

    def tell(self, text: str, level: int = logging.INFO) -> None:
        """Log one line, on rank 0 only.

        Args:
            text: the line, without the stage.
            level: level of `logging`.
        """
        self.history.tell(self.stage, text, level)

    # -- the program of a step -----------------------------------------------------------------------------------------

    def _call(self, program: Program) -> StepBallot:
        under, taken_for = self.taken.under, self.taken.program
        mask = self.programs.vote(program, taken_for)
        self.taken.was_right = taken_for is None or bool(mask >> taken_for.index & 1)
        if taken_for is not None:
            taken_for.unwatched = 0 if program.operators is not None else taken_for.unwatched + 1
        if not self._confirmed:
            begun_for, limits = taken_for or self.programs.current, self.programs.limits
            has_room = self.programs.has_room(program, begun_for) is not False
            mask |= 1 << begun_for.index if has_room and related(program, self.first, *limits) else 0
        if not self._technique.is_free:
            mask &= (1 << FIRST_BELOW) - 1
        mask |= (FREE if self._technique.is_free else 0) | (0 if program.is_mixed else EVEN)
        if under is not None:
            mask |= 1 << FIRST_UNDER + under.index
            may_turn = under.stage is not Stage.WARM_UP and not under.is_proven
            mask |= ALIKE if may_turn and self.programs.is_alike(program, under) else 0
        return StepBallot(
            self.history.step, program, mask, self._ranks.vote(mask), self.programs.current, under, self.taken.inputs
        )

    def _follow(self, ballot: StepBallot) -> None:
        """Read the votes on a step, and change the stage and decisions of its program accordingly."""
        mask = ballot.agreed()
        under = self.programs.under(mask)
        if under is not None:
            self.programs.see(under)  # first: a new program may take the place of the one that ran longest ago
        seen = self._seen(ballot, mask, under)
        if seen is None:
            seen = self._meet(ballot)
        elif seen is not self._last and seen.is_settled:
            self.history.note_return(seen)
        self.programs.see(seen)
        self._order.add(seen.index)
        self._last = seen
        if ballot.inputs:
            seen.note_beginning(ballot.inputs, ballot.program)
        seen.is_mixed = seen.is_mixed or not mask & EVEN
        if not mask & FREE:
            self._bound.add(seen.family)
        self._note_turns(seen, under, bool(mask & ALIKE))
        seen.steps += 1
        before = seen.stage
        outcome = self._judge(seen, under, ballot.step)
        if before is Stage.WARM_UP:
            self.programs.renew(ballot.program, seen)
        if outcome is StepOutcome.SETTLED:
            seen.stage = after(before, outcome)
            self._propose(seen) if before is Stage.WARM_UP else self._adopt(seen)
        elif before is Stage.STABLE and under is seen and ballot.program.operators is not None:
            seen.is_proven = True
        self._look_for_repetition(seen)

    def _seen(self, ballot: StepBallot, mask: int, under: Remembered | None) -> Remembered | None:
        """Return the program of a step by the votes of all ranks; None if it is to be remembered."""
        is_searched = under is not None and under.stage is Stage.GEN_POLICY and mask >> under.index & 1
        if is_searched and self.taken.is_shared:  # another rank's step may be larger
            return under
        seen = self.programs.agreed(mask & SIMILAR, under, ballot.expected, alike=not mask & FREE)
        is_below = seen is not None and mask >> FIRST_BELOW + seen.index & 1
        return self._meet(ballot, above=seen) if is_below and not self.programs.is_mixed(seen.family) else seen

    def _meet(self, ballot: StepBallot, above: Remembered | None = None) -> Remembered:
        """Remember the program of a step that ranks have not seen before.

        Args:
            ballot: this rank's vote on the step.
            above: the next larger program of the family; None if there is none, or no family.
        """
        program, expected = ballot.program, ballot.expected
        seen = families.meet(self.programs, self._ranks, program, above, self.warmup_steps)
        if expected is not None:
            is_others = above is None and ballot.mask & SIMILAR
            change = difference(program, (above or expected).baseline)
            self._change = "another rank's step differs from those before" if is_others else change
            reason = f"{named(seen)} is planned for once it repeats: {self._change}"
            self.history.note(seen, reason, news=expected.stage is not Stage.WARM_UP)
        return seen

    def _note_turns(self, seen: Remembered, under: Remembered | None, alike: bool) -> None:
        """Detect turns: a plan changes the operators that steps run, so they count as steps of another program.

        Nothing but the operators changes, and they change back when the plan is withdrawn. The next plan would do the
        same, so after `MOST_TURNS` turns the program stays at the safest setting. A program that ran under other
        settings too is no such product of a plan.

        Args:
            seen: the program of the step that ended.
            under: the program under whose settings all ranks ran it; None if they did not run it under the same.
            alike: True if on all ranks the step has inputs and autograd nodes like those of the program in `under`.
        """
        turned = self._turned
        if turned is not None and seen is turned[0]:
            self._turned = None
            if seen.note_turn(turned[1]):
                self._stay_safest(seen)
        elif alike and under is not None and seen.family != under.family and not (seen.is_genuine or seen.is_settled):
            self._turned = under, seen
        if under is None or under is seen or under.stage is Stage.WARM_UP:
            seen.is_genuine = True

    def _judge(self, seen: Remembered, under: Remembered | None, step: int) -> StepOutcome:
        if seen.stage is Stage.WARM_UP:
            return StepOutcome.SETTLED if seen.steps > self.warmup_steps else StepOutcome.STEADY
        if seen.stage is Stage.GEN_POLICY and under is seen:
            self._technique.turn(seen)
            seen.decisions = self._technique.advance(step)
            return StepOutcome.STEADY if seen.decisions is None else StepOutcome.SETTLED
        return StepOutcome.STEADY

    def _look_for_repetition(self, seen: Remembered) -> None:
        """Treat every step as the same program from now on if no program repeats, or none repeats often enough."""
        self._unplanned_steps = self._unplanned_steps + 1 if seen.stage is Stage.WARM_UP else 0
        most = HORIZON_STEPS * (self.warmup_steps + 1)
        if not self.programs.indifferent and (self._order.never_repeats or self._unplanned_steps >= most):
            self.programs.indifferent = True
            for other in self.programs:
                if other is not seen:
                    self._technique.forget(other)
            self.history.warn_of_one_plan(self._change)

    def _expected(self) -> Remembered:
        """Return the program that the next step is likely to run, as all ranks know it by now."""
        if self.programs.indifferent or self._last is None:
            return self._last or self.programs.current
        program = self.programs[self._order.follows(ahead=1 if self._ballot is None else 2)]
        members = self.programs.members(program.family)
        if program.family in self._bound or self.programs.is_mixed(program.family):
            return members[-1]
        searched = [one for one in members if one.stage is Stage.GEN_POLICY]
        return searched[-1] if searched and self.taken.is_shared else program

    # -- changes of stage ----------------------------------------------------------------------------------------------

    def _propose(self, program: Remembered) -> None:
        """Enter gen-policy: the program's next step is observed."""
        tries = self._tries
        self._technique.turn(program)
        self._technique.may_keep = not self.programs.indifferent
        self._technique.share_of = program.share
        self._technique.propose(None)
        seen = f"{named(program)} ran {program.steps} times"
        then = f", then tries up to {tries} plans" if tries else ""
        self.history.note(program, f"{seen}: memplug times every operator of its next step{then}")

    def _adopt(self, program: Remembered) -> None:
        """Enter stable, under the best of the plans that were tried."""
        technique, decisions = self._technique, program.decisions
        if wrong := technique.judge(decisions):
            raise LayoutError(f"the judge refuses the plan: {wrong}", "Please report it, with a trace.", code="MP016")
        self.replans += 1
        program.plans = self.replans
        technique.install(decisions)
        if all(one.stage is not Stage.GEN_POLICY for one in self.programs):
            technique.retain(one.decisions for one in self.programs if one.decisions is not None)
        self.history.note(program, "; ".join(filter(None, [technique.in_words(decisions), technique.outcome])))

    def _stay_safest(self, program: Remembered) -> None:
        """Make no more plans for a program."""
        program.decisions, program.stage = None, Stage.STABLE
        self._technique.turn(program)
        self._technique.withdraw()
        self.history.warn_of_safest(program)

    def _plan_anew(self) -> None:
        """Return all programs to warm-up at the safest setting: the device has less room than the plans rely on."""
        self._ballot = self._turned = None
        for program in self.programs:
            program.stage = after(program.stage, StepOutcome.SHORT)
            program.drop_plan()
            self._technique.forget(program)
        current = self.programs.current
        reason = f"{named(current)} is planned for once it repeats: the device has less room than its plan needs"
        self.history.note(current, reason)
        self.taken.expect(current)

    def _forget(self, program: Remembered) -> None:
        self._order.forget(program.index)
        self._technique.forget(program)
