"""The vote of a rank on the program of a step, and a stable program with its decisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memplug.profile.similarity import Program
from memplug.session.remembered import Remembered


@dataclass(frozen=True, slots=True)
class StepBallot:
    """This rank's vote on the program of a step; the next step may run before the votes are read.

    Attributes:
        step: number of the step, from 1.
        program: the program that this rank ran.
        mask: this rank's vote.
        agreed: waits for the votes of all ranks, and returns their bitwise AND.
        expected: the program that all ranks expected.
        under: the program under whose settings this rank ran the step; None: under those of no program.
        inputs: the inputs that the step began with; "" if unknown.
    """

    step: int
    program: Program
    mask: int
    agreed: Callable[[], int]
    expected: Remembered | None
    under: Remembered | None
    inputs: str


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


def lasting(program: Remembered) -> Lasting | None:
    """Return a program with its decisions; None while it has not settled."""
    return Lasting(program, program.decisions) if program.is_settled else None
