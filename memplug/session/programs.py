"""The programs that a run's steps ran so far, with their decisions, and this rank's vote on the program of a step.

A vote is a bit mask of the remembered programs that a step is similar to. Each rank compares its step with one
of its own earlier steps for each program, the program's baseline. Programs are remembered and forgotten at the same
steps on all ranks, so a bit means the same program everywhere. The bitwise AND of all votes keeps the bits of those
programs that the step resembles on every rank. If one rank sees a change, its vote lacks the expected program's bit, so
all ranks change together.

Further bits of a vote tell under which program's settings the rank ran the step: those of the program that all ranks
expected, or of another one that this rank recognised by the step's inputs. A step counts for a program's search for a
plan only if all ranks ran the program under its own settings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import Any

from memplug.profile.similarity import Program, similar
from memplug.session.table import Stage

MOST_PROGRAMS = 32
"""Number of programs remembered at a time, one bit of a vote each. If a run has more, few repay a plan."""

SIMILAR = (1 << MOST_PROGRAMS) - 1
"""The bits of a vote that name programs which the step is similar to."""

ALIKE = 1 << MOST_PROGRAMS
"""Bit of a vote: inputs and autograd nodes are like those of the program under whose settings the step ran, whatever
the operators are."""

FIRST_UNDER = MOST_PROGRAMS + 1
"""The first of the bits of a vote that name the program under whose settings the step ran."""

MOST_BEGINNINGS = 16
"""Number of inputs remembered for each program, by which its steps are recognised when they begin."""

MOST_TURNS = 2
"""Number of turns after which memplug plans no more for a program. A turn: under a plan, it ran as another one."""


class Remembered:
    """A program that a step ran, its stage, and the plan for it.

    Attributes:
        index: the program's bit in a vote.
        stage: the program's stage.
        steps: number of its steps since it was first seen, or since its plan was dropped: StableStep in Algorithm 1.
        baseline: the step of this rank that later steps are compared with. During warm-up it is the latest step. From
            planning on it stays the same, so that a slow drift adds up to a change.
        nodes: the fewest and the most autograd nodes of watched steps that ran the program.
        decisions: the part of the agreed technique to run the program under; None before there is one.
        begins: shapes and dtypes of the inputs that this rank's steps began with, the latest last.
        unwatched: number of this rank's steps of the program since its operators were last watched.
        is_proven: True once a step with watched operators ran the program under its plan.
        is_genuine: True once a step ran the program under other settings than another program's plan.
        told: changes of stage that the log has already reported for the program.
        turns: number of times in a row that its steps ran as another program under a plan, each time the same.
    """

    def __init__(self, index: int, baseline: Program):
        self.index = index
        self.baseline = baseline
        self.nodes = (baseline.nodes, baseline.nodes)
        self.stage = Stage.WARM_UP
        self.steps = self.unwatched = 0
        self.decisions: Any = None
        self.begins: dict[str, None] = {}
        self.is_proven = self.is_genuine = False
        self.told: set[object] = set()
        self.turns = 0
        self._became: Remembered | None = None

    def note_nodes(self, program: Program) -> None:
        """Count the nodes of a step that ran the program."""
        fewest, most = self.nodes
        self.nodes = min(fewest, program.nodes), max(most, program.nodes)

    @property
    def is_settled(self) -> bool:
        """Return whether the program has decisions, or stays at the safest setting for good."""
        return self.stage is Stage.STABLE

    def note_beginning(self, inputs: str) -> None:
        """Remember the inputs that a step of this rank began with."""
        self.begins.pop(inputs, None)
        self.begins[inputs] = None
        while len(self.begins) > MOST_BEGINNINGS:
            del self.begins[next(iter(self.begins))]

    def is_smaller(self, inputs: str, tolerance: float) -> bool:
        """Return whether inputs have more elements than any that the program's steps began with, beyond a tolerance."""
        largest = max(map(elements, self.begins), default=None)
        return largest is not None and elements(inputs) > (1 + tolerance) * largest

    def drop_plan(self) -> None:
        """Count the program's steps anew: it gets another plan."""
        self.decisions, self.steps, self.is_proven = None, 0, False

    def note_turn(self, other: Remembered) -> bool:
        """Count a turn: under a plan, steps ran as another program; now that it is withdrawn, they run as before.

        Args:
            other: the program that steps ran under the plan.

        Returns:
            True if no more plans are to be made for it.
        """
        self.turns = self.turns + 1 if self._became is other else 1
        self._became = other
        return self.turns >= MOST_TURNS


class Programs:
    """All remembered programs, and the current one: that which the next step is expected to run.

    Args:
        length_tolerance: see `similarity.similar`.
        cosine_similarity: see `similarity.similar`.
        forget: called with a program that is forgotten, since another one takes its index.
    """

    def __init__(
        self,
        length_tolerance: float,
        cosine_similarity: float,
        forget: Callable[[Remembered], None] = lambda program: None,
    ):
        self._forget = forget
        self.current: Remembered | None = None
        self.made = 0  # number of programs ever remembered
        self.indifferent = False  # True once all steps count as the current program
        self.doubts = False  # True if only the operators of the next step will show whether another program runs
        self.limits = (length_tolerance, cosine_similarity)
        self._all: list[Remembered] = []
        self._by_age: list[Remembered] = []  # by the time when each was last seen or current, the earliest first
        self._voted: tuple[Program, int] | None = None

    def __iter__(self) -> Iterator[Remembered]:
        """Iterate over the remembered programs, in order of index."""
        return iter(self._all)

    def __len__(self) -> int:
        """Return the number of remembered programs."""
        return len(self._all)

    def __getitem__(self, index: int) -> Remembered:
        """Return the program of this index."""
        return self._all[index]

    def vote(self, program: Program, taken_for: Remembered | None = None) -> int:
        """Return the mask of the remembered programs that a step of this rank is similar to; bit number = index.

        A step that equals the previous one gets the same vote without a comparison. A step that was not watched counts
        as one of the program that it was taken for if it differs only in its number of nodes, and the program's steps
        differ in that: the next step's operators tell.

        Args:
            program: the step.
            taken_for: the program whose step it was taken for; None: the current one.
        """
        if self.indifferent:
            return 1 << self.current.index
        voted, taken_for = self._voted, taken_for or self.current
        if voted is None or not _as_well_known(program, voted[0]) or not program.same(voted[0]):
            alike = [one for one in self._all if similar(program, one.baseline, *self.limits)]
            self.doubts = False
            if program.operators is not None:
                for one in alike:
                    one.note_nodes(program)
            elif taken_for is not None and taken_for not in alike and self._may_be(taken_for, program):
                self.doubts = True
                alike.append(taken_for)
            self._voted = program, sum(1 << one.index for one in alike)
        return self._voted[1]

    def _may_be(self, known: Remembered, program: Program) -> bool:
        """Return whether a step that was not watched differs from a program only in what varies there."""
        fewest, most = known.nodes
        return fewest < most and similar(replace(program, nodes=0), known.baseline, *self.limits)

    def is_alike(self, program: Program, known: Remembered) -> bool:
        """Return whether a step is like a program in all but its operators."""
        return similar(replace(program, operators=None), known.baseline, *self.limits)

    def under(self, mask: int) -> Remembered | None:
        """Return the program under whose settings all ranks ran a step; None if they did not run it under the same."""
        return next((one for one in self._all if mask >> FIRST_UNDER + one.index & 1), None)

    def agreed(
        self, mask: int, under: Remembered | None = None, expected: Remembered | None = None
    ) -> Remembered | None:
        """Return the program of a step by the votes of all ranks; None if it is not remembered.

        The votes may match several remembered programs, for example after a step that was not watched. Then the one
        under whose settings the step ran comes first. After it come settled programs (see `Remembered.is_settled`), and
        among these the expected one, so that similar programs do not alternate, and the one that ran most recently.

        Args:
            mask: the bitwise AND of all votes.
            under: the program under whose settings all ranks ran the step.
            expected: the program that all ranks expected; None: the current one.
        """
        seen, expected = [one for one in self._all if mask >> one.index & 1], expected or self.current
        if under in seen:
            return under
        seen = [one for one in seen if one.is_settled] or seen
        if expected in seen:
            return expected
        return max(seen, key=self._by_age.index, default=None)

    def beginning_with(self, inputs: str) -> list[Remembered]:
        """Return the programs of which this rank's steps began with these inputs, the latest last."""
        return [one for one in self._by_age if inputs in one.begins]

    def remember(self, program: Program) -> Remembered:
        """Add a program; if there is no room, forget the one that ran last longest ago."""
        index = len(self._all)
        if index == MOST_PROGRAMS:
            forgotten = next(one for one in self._by_age if one is not self.current)
            self._by_age.remove(forgotten)
            index = forgotten.index
            self._forget(forgotten)
        new = Remembered(index, program)
        self._all[index : index + 1] = [new]
        self._by_age.append(new)
        self._voted = None
        self.made += 1
        return new

    def enter(self, program: Remembered) -> None:
        """Make a program the current one."""
        self.current = program
        self.see(program)

    def see(self, program: Remembered) -> None:
        """Note that a step ran a program."""
        self._by_age.remove(program)
        self._by_age.append(program)

    def renew(self, baseline: Program, program: Remembered | None = None) -> None:
        """Make the latest step a program's baseline, if it differs from the baseline or shows more.

        A step shows more than the baseline if only the step was watched, or if more regions were observed in it.

        Args:
            baseline: the latest step.
            program: the program that the step ran; None: the current one.
        """
        program = program or self.current
        known = program.baseline
        knows_more = baseline.operators is not None and known.operators is None or baseline.unseen < known.unseen
        if knows_more or not baseline.same(known):
            program.baseline = baseline
            self._voted = None


def elements(inputs: str) -> int:
    """Return the number of elements of inputs, described as in "int64[4, 512], float32[]"."""
    shapes = re.findall(r"\[([^]]*)\]", inputs)
    return sum(prod(int(size) for size in shape.split(",") if size.strip()) for shape in shapes)


def _as_well_known(one: Program, other: Program) -> bool:
    """Return whether both steps or neither were watched, and the same regions were observed."""
    return (one.operators is None) is (other.operators is None) and one.unseen == other.unseen
