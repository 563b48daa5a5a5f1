"""The programs that a run has shown so far, each with its decisions: what a rank votes on, and what all ranks agree on.

A vote is a bit mask of the remembered programs that a step is similar to. Every rank compares its own step with its own
baselines; programs are remembered and forgotten at the same steps on all ranks, so that a bit means the same program
everywhere, and the programs that all ranks see are the bitwise and of all votes. A rank that sees a change takes the
others with it: no program is left that all of them see.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from memplug.profile.similarity import Program, similar

MOST_PROGRAMS = 32
"""Remembered at a time, so that a vote is one number. More sequence lengths than that are not worth a plan each."""

ALIKE = 1 << MOST_PROGRAMS
"""Of a vote: in its inputs and nodes the step is like the current program, whatever its operators are."""

MOST_TURNS = 2
"""Of a program, after which it is planned for no more: a plan that turns it into another one would be made for ever."""


class Remembered:
    """A program that was seen.

    Attributes:
        index: its bit in a vote.
        baseline: a step of it on this rank, which others are compared with. While warming up it is the latest; from
            planning on it stays, so that drift adds up to a change instead of creeping past every comparison.
        decisions: how to run it; None until it was planned for.
        borrowed: the decisions were made for another program, under which this one came and went in a single step.
        told: what the log has said of it.
        turns: how often a step under a plan for it looked like the same other program, until the plan was withdrawn.
    """

    def __init__(self, index: int, baseline: Program):
        self.index = index
        self.baseline = baseline
        self.decisions: Any = None
        self.borrowed = False
        self.told: set[object] = set()
        self.turns = 0
        self._became: Remembered | None = None

    @property
    def is_settled(self) -> bool:
        """It is known how to run it: by decisions, or at the safest setting for good."""
        return self.decisions is not None or self.turns >= MOST_TURNS

    def note_turn(self, other: Remembered) -> bool:
        """It became another program by a plan, and is back without it. Returns whether it is to be planned for no
        more.
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
        length_tolerance, cosine_similarity: see `similarity.similar`.
    """

    def __init__(self, length_tolerance: float, cosine_similarity: float):
        self.current: Remembered | None = None
        self.made = 0  # also those that are forgotten
        self.indifferent = False  # every step counts as the current program
        self.limits = (length_tolerance, cosine_similarity)
        self._all: list[Remembered] = []
        self._by_age: list[Remembered] = []  # the least recently current first
        self._voted: tuple[Program, int] | None = None

    def __iter__(self) -> Iterator[Remembered]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def forget_plans(self) -> None:
        """The programs stay, to be planned for anew."""
        for one in self._all:
            one.decisions = None

    def vote(self, program: Program) -> int:
        """Mask of the remembered programs that a step of this rank is similar to; bit = index.

        A step that is exactly the last one has the last one's vote.
        """
        if self.indifferent:
            return 1 << self.current.index
        voted = self._voted
        if voted is None or not _as_well_known(program, voted[0]) or not program.same(voted[0]):
            bits = (1 << one.index for one in self._all if similar(program, one.baseline, *self.limits))
            self._voted = program, sum(bits)
        return self._voted[1]

    def is_alike(self, program: Program) -> bool:
        """Whether a step is like the current program but for its operators."""
        return similar(replace(program, operators=None), self.current.baseline, *self.limits)

    def agreed(self, mask: int) -> Remembered | None:
        """The program of a step, by the votes of all ranks; None: one that is not remembered.

        The current one if it can be, so that similar programs do not take turns; but one that has decisions before one
        that has none, since a step that was not watched may be either. Else the latest.
        """
        seen = [one for one in self._all if mask >> one.index & 1]
        seen = [one for one in seen if one.is_settled] or seen
        if self.current in seen:
            return self.current
        return max(seen, key=self._by_age.index, default=None)

    def remember(self, program: Program) -> Remembered:
        """Add a program. Where there is no room, the least recently current one is forgotten, never the current."""
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
        """It is the current one from now on."""
        self.current = program
        self._by_age.remove(program)
        self._by_age.append(program)

    def renew(self, baseline: Program) -> None:
        """The latest step of the current program is what the next ones are compared with."""
        current = self.current.baseline
        knows_more = baseline.operators is not None and current.operators is None or baseline.unseen < current.unseen
        if knows_more or not baseline.same(current):
            self.current.baseline = baseline
            self._voted = None


def _as_well_known(one: Program, other: Program) -> bool:
    """Whether as much was seen of the one step as of the other."""
    return (one.operators is None) is (other.operators is None) and one.unseen == other.unseen
