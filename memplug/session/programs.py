"""The programs that a run's steps ran so far, with their decisions, and this rank's vote on the program of a step.

A vote is a bit mask of the remembered programs that a step is similar to. Each rank compares its step with one
of its own earlier steps for each program, the program's baseline. Programs are remembered and forgotten at the same
steps on all ranks, so a bit means the same program everywhere. The bitwise AND of all votes keeps the bits of those
programs that the step resembles on every rank. If one rank sees a change, its vote lacks the current program's bit, so
all ranks change together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from memplug.profile.similarity import Program, similar

MOST_PROGRAMS = 32
"""Number of programs remembered at a time, one bit of a vote each. If a run has more, few repay a plan."""

ALIKE = 1 << MOST_PROGRAMS
"""Bit of a vote: the step's inputs and autograd nodes are like the current program's, whatever its operators are."""

MOST_TURNS = 2
"""Number of turns after which memplug plans no more for a program. A turn: under a plan, it ran as another one."""


class Remembered:
    """A program that a step ran, with the plan for it.

    Attributes:
        index: the program's bit in a vote.
        baseline: the step of this rank that later steps are compared with. During warm-up it is the latest step. From
            planning on it stays the same, so that a slow drift adds up to a change.
        nodes: the fewest and the most autograd nodes of watched steps that ran the program.
        decisions: the part of the agreed technique to run the program under; None before there is one.
        borrowed: True if the decisions were made for another program, and this one has run a step under them.
        told: changes of stage that the log has already reported for the program.
        turns: number of plans in a row under which steps of this program ran as another program, each time the same.
    """

    def __init__(self, index: int, baseline: Program):
        self.index = index
        self.baseline = baseline
        self.nodes = (baseline.nodes, baseline.nodes)
        self.decisions: Any = None
        self.borrowed = False
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
        return self.decisions is not None or self.turns >= MOST_TURNS

    def note_turn(self, other: Remembered) -> bool:
        """Count a turn: under a plan, steps ran as another program; now that it is withdrawn, they run as before.

        Args:
            other: the program that steps ran under the plan.

        Returns:
            True if no more plans are to be made for it.
        """
        self.turns = self.turns + 1 if self._became is other else 1
        self._became = other
        if self.turns < MOST_TURNS:
            return False
        self.decisions = None
        return True


class Programs:
    """All remembered programs, and the current one.

    Args:
        length_tolerance: see `similarity.similar`.
        cosine_similarity: see `similarity.similar`.
    """

    def __init__(self, length_tolerance: float, cosine_similarity: float):
        self.current: Remembered | None = None
        self.made = 0  # number of programs ever remembered
        self.indifferent = False  # True once all steps count as the current program
        self.doubts = False  # True if only the operators of the next step will show whether another program runs
        self.limits = (length_tolerance, cosine_similarity)
        self._all: list[Remembered] = []
        self._by_age: list[Remembered] = []  # by the time when each was last current, the earliest first
        self._voted: tuple[Program, int] | None = None

    def __iter__(self) -> Iterator[Remembered]:
        """Iterate over the remembered programs, in order of index."""
        return iter(self._all)

    def __len__(self) -> int:
        """Return the number of remembered programs."""
        return len(self._all)

    def forget_plans(self) -> None:
        """Drop the decisions of all programs, but remember the programs: each gets a new plan when it repeats."""
        for one in self._all:
            one.decisions = None

    def vote(self, program: Program) -> int:
        """Return the mask of the remembered programs that a step of this rank is similar to; bit number = index.

        A step that equals the previous one gets the same vote without a comparison. A step that was not watched counts
        as one of the current program if it differs only in its number of nodes, and the program's steps differ in that:
        the next step's operators tell.
        """
        if self.indifferent:
            return 1 << self.current.index
        voted = self._voted
        if voted is None or not _as_well_known(program, voted[0]) or not program.same(voted[0]):
            alike = [one for one in self._all if similar(program, one.baseline, *self.limits)]
            self.doubts = False
            if program.operators is not None:
                for one in alike:
                    one.note_nodes(program)
            elif self.current is not None and self.current not in alike and self._may_be_current(program):
                self.doubts = True
                alike.append(self.current)
            self._voted = program, sum(1 << one.index for one in alike)
        return self._voted[1]

    def _may_be_current(self, program: Program) -> bool:
        """Return whether a step that was not watched differs from the current program only in what varies there."""
        fewest, most = self.current.nodes
        return fewest < most and similar(replace(program, nodes=0), self.current.baseline, *self.limits)

    def is_alike(self, program: Program) -> bool:
        """Return whether a step is like the current program in all but its operators."""
        return similar(replace(program, operators=None), self.current.baseline, *self.limits)

    def agreed(self, mask: int) -> Remembered | None:
        """Return the program of a step by the votes of all ranks; None if it is not remembered.

        The votes may match several remembered programs, for example after a step that was not watched. Then settled
        programs come first (see `Remembered.is_settled`). Among these the current program comes first, so that similar
        programs do not alternate, and after it the one that was current most recently.
        """
        seen = [one for one in self._all if mask >> one.index & 1]
        seen = [one for one in seen if one.is_settled] or seen
        if self.current in seen:
            return self.current
        return max(seen, key=self._by_age.index, default=None)

    def remember(self, program: Program) -> Remembered:
        """Add a program; if there is no room, forget the one that was last current longest ago."""
        index = len(self._all)
        if index == MOST_PROGRAMS:
            forgotten = next(one for one in self._by_age if one is not self.current)
            self._by_age.remove(forgotten)
            index = forgotten.index
        new = Remembered(index, program)
        self._all[index : index + 1] = [new]
        self._by_age.append(new)
        self._voted = None
        self.made += 1
        return new

    def enter(self, program: Remembered) -> None:
        """Make a program the current one."""
        self.current = program
        self._by_age.remove(program)
        self._by_age.append(program)

    def renew(self, baseline: Program) -> None:
        """Make the latest step the current program's baseline, if it differs from the baseline or shows more.

        A step shows more than the baseline if only the step was watched, or if more regions were observed in it.

        Args:
            baseline: the latest step.
        """
        current = self.current.baseline
        knows_more = baseline.operators is not None and current.operators is None or baseline.unseen < current.unseen
        if knows_more or not baseline.same(current):
            self.current.baseline = baseline
            self._voted = None


def _as_well_known(one: Program, other: Program) -> bool:
    """Return whether both steps or neither were watched, and the same regions were observed."""
    return (one.operators is None) is (other.operators is None) and one.unseen == other.unseen
