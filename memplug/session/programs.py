"""The programs that a run's steps ran so far, with their decisions, and this rank's vote on the program of a step.

A vote is a bit mask of the remembered programs that a step fits. Each rank compares its step with one
of its own earlier steps for each program, the program's baseline. Programs are remembered and forgotten at the same
steps on all ranks, so a bit means the same program everywhere. The bitwise AND of all votes keeps the bits of those
programs that the step resembles on every rank. If one rank sees a change, its vote lacks the expected program's bit, so
all ranks change together.

Programs that differ in nothing but the sizes of their inputs are a family. Each is made for steps of up to a largest
size, and a smaller step fits it too: what is planned for the larger step has room for it. A vote has the bits of all
programs that the step fits, so the smallest program in the bitwise AND is the one that the largest step of any rank
fits. Bits of their own tell for which programs a step is so small that another program suits it better. Then there
will be one, unless all ranks' steps have to run alike: these are planned for as the largest.

Further bits of a vote tell under which program's settings the rank ran the step: those of the program that all ranks
expected, or of another one that this rank recognised by the step's inputs. A step counts for a program's search for a
plan only if all ranks ran the program under its own settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from memplug.profile.similarity import Program, related, similar
from memplug.session.remembered import Remembered
from memplug.session.table import Stage

MOST_PROGRAMS = 32
"""Number of programs remembered at a time, one bit of a vote each. If a run has more, few repay a plan."""

SIMILAR = (1 << MOST_PROGRAMS) - 1
"""The bits of a vote that name programs which the step fits."""

ALIKE = 1 << MOST_PROGRAMS
"""Bit of a vote: inputs and autograd nodes are like those of the program under whose settings the step ran, whatever
the operators are."""

FIRST_UNDER = MOST_PROGRAMS + 1
"""The first of the bits of a vote that name the program under whose settings the step ran."""

FIRST_BELOW = FIRST_UNDER + MOST_PROGRAMS
"""The first of the bits of a vote that name programs which the step fits, but which are made for larger steps."""

FREE = 1 << FIRST_BELOW + MOST_PROGRAMS
"""Bit of a vote: the rank may turn to another program by itself, since no collective depends on it."""

EVEN = FREE << 1
"""Bit of a vote: all forwards of the step had inputs of one size, so that the first one tells the size of the step."""

BAND = 1.5
"""A program is made for steps of its largest size down to this fraction of it."""


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
        self.made = self._families = 0  # number of programs, and of families, ever remembered
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
        """Return the mask of the remembered programs that a step of this rank fits; bit number = index.

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
            alike = [one for one in self._all if self.fits(program, one)]
            self.doubts = False
            if program.operators is not None:
                for one in alike:
                    one.note_nodes(program)
            elif taken_for is not None and taken_for not in alike and self._may_be(taken_for, program):
                self.doubts = True
                alike.append(taken_for)
            shares = {one.index: one.share(program) for one in alike}
            below = [index for index, share in shares.items() if share is not None and share * BAND <= 1 + 1e-6]
            self._voted = program, sum(1 << index for index in (*shares, *(FIRST_BELOW + index for index in below)))
        return self._voted[1]

    def fits(self, program: Program, known: Remembered) -> bool:
        """Return whether a step of this rank runs like a program, and is no larger than those that it is made for.

        A step of unknown size fits, as does an empty one.
        """
        return self.has_room(program, known) is not False and related(program, known.baseline, *self.limits)

    def has_room(self, program: Program, known: Remembered) -> bool | None:
        """Return whether a step is no larger than those that a program is made for; None if no region shows it."""
        share = known.share(program)
        return None if share is None else share <= 1 + self.limits[0]

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
        self, mask: int, under: Remembered | None = None, expected: Remembered | None = None, alike: bool = False
    ) -> Remembered | None:
        """Return the program of a step by the votes of all ranks; None if it is not remembered.

        The votes may match several remembered programs, for example after a step that was not watched. Then the one
        under whose settings the step ran comes first. After it come settled programs (see `Remembered.is_settled`), and
        among these the expected one, so that similar programs do not alternate, and the one that ran most recently.

        Args:
            mask: the bitwise AND of all votes.
            under: the program under whose settings all ranks ran the step.
            expected: the program that all ranks expected; None: the current one.
            alike: True if all ranks' steps have to run alike: the largest program of a family comes first.
        """
        fitting, expected = [one for one in self._all if mask >> one.index & 1], expected or self.current
        seen = [one for one in fitting if self._is_last(one, fitting, largest=alike)]
        if under in seen:
            return under
        seen = [one for one in seen if one.is_settled] or seen
        if expected in seen:
            return expected
        return max(seen, key=self._by_age.index, default=None)

    def is_mixed(self, family: int | str) -> bool:
        """Return whether steps of a family had forwards of several sizes; then all run by the plan for the largest."""
        return any(one.is_mixed for one in self._all if one.family == family)

    def _is_last(self, one: Remembered, among: list[Remembered], largest: bool = False) -> bool:
        """Return whether a program is made for the smallest steps, or the largest, of those of its family."""
        family = [other for other in self.members(one.family) if other in among]
        return one is family[-1 if largest or self.is_mixed(one.family) else 0]

    def members(self, family: int | str) -> list[Remembered]:
        """Return the programs of a family, by the size of the steps that they are made for, the smallest first."""
        return sorted((one for one in self._all if one.family == family), key=lambda one: one.extent)

    def covers(self, larger: Remembered, one: Remembered) -> bool:
        """Return whether the steps of a program fit another one of its family."""
        return larger.family == one.family and larger.extent >= one.extent

    def covering(self, one: Remembered) -> Remembered:
        """Return the program under whose plan a program's steps may run: its own, or of the next larger with a plan."""
        if one.stage is not Stage.WARM_UP:
            return one
        larger = [
            each for each in self._all if self.covers(each, one) and each.is_settled and each.decisions is not None
        ]
        return next((each for each in larger if self._is_last(each, larger)), one)

    def beginning_with(self, inputs: str) -> list[Remembered]:
        """Return the programs of which this rank's steps began with these inputs, the latest last.

        If none did, return the smallest of those that a step with such inputs probably fits.
        """
        most = 1 + self.limits[0]
        if known := [one for one in self._by_age if inputs in one.begins]:
            fitting = [one for one in self._by_age if any(self._has_room_for(inputs, one, other) for other in known)]
            return [one for one in fitting if self._is_last(one, fitting)]
        shares = {one: one.likely_share(inputs) for one in self._by_age}
        fitting = [one for one, share in shares.items() if share is not None and share <= most]
        return [one for one in fitting if self._is_last(one, fitting)]

    def _has_room_for(self, inputs: str, one: Remembered, known: Remembered) -> bool:
        """Return whether a program of the family of a known one has room for all steps that began with these inputs."""
        family = [other for other in self._all if other.family == known.family and inputs in other.begins]
        needed = max((other.begins[inputs] or 0) * other.extent for other in family)
        return one.family == known.family and needed <= (1 + self.limits[0]) * one.extent

    def relatives(self, program: Program) -> int:
        """Return the mask of the programs that a step of this rank differs from in nothing but sizes."""
        return sum(1 << one.index for one in self._all if related(program, one.baseline, *self.limits))

    def family_of(self, relatives: int) -> int | str | None:
        """Return the family of the first program in a mask; None for an empty mask."""
        return next((one.family for one in self._all if relatives >> one.index & 1), None)

    def remember(
        self,
        program: Program,
        family: int | str | None = None,
        extent: float = 1.0,
        reach: float = 1.0,
        is_mixed: bool = False,
    ) -> Remembered:
        """Add a program; if there is no room, forget the one that ran last longest ago.

        Args:
            program: the step that ran it first.
            family: the family that it belongs to; None: one of its own.
            extent: see `Remembered`.
            reach: see `Remembered`.
            is_mixed: see `Remembered`.
        """
        index = len(self._all)
        if index == MOST_PROGRAMS:
            forgotten = next(one for one in self._by_age if one is not self.current)
            self._by_age.remove(forgotten)
            index = forgotten.index
            self._forget(forgotten)
        new = Remembered(index, program, self._families if family is None else family, extent, reach)
        self._families += family is None
        new.is_mixed = is_mixed
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
            growth = baseline.over(known)
            program.reach = max(1.0, program.reach / growth) if growth is not None else program.reach
            program.baseline = baseline
            self._voted = None


def _as_well_known(one: Program, other: Program) -> bool:
    """Return whether both steps or neither were watched, and the same regions were observed."""
    return (one.operators is None) is (other.operators is None) and one.unseen == other.unseen
