"""The program that a rank takes a step for: the one that all ranks expect, or one that it recognises by the inputs."""

from __future__ import annotations

from typing import Any

from memplug.session.lasting import Lasting, lasting
from memplug.session.programs import Programs, Remembered
from memplug.session.technique import AgreedTechnique

UNSURE_STEPS = 16  # a rank that recognised an unexpected program is unsure of what is expected for so many steps


class TakenProgram:
    """The program of the step that runs or is about to.

    Args:
        technique: the technique that turns to the program.
        programs: the programs that the session remembers.
        running: see below, while there are no programs.

    Attributes:
        program: the program; None while it is unknown.
        under: the program by whose settings all regions run; None: by those of no program.
        running: the program with the decisions that regions run under; None while it is not stable.
        inputs: the inputs that the step began with; "" if unknown.
        was_right: whether the step that ended was, by this rank's vote, one of the program that it was taken for.
    """

    def __init__(self, technique: AgreedTechnique[Any], programs: Programs, running: Lasting | None):
        self.program: Remembered | None = None
        self.under: Remembered | None = None
        self.running = running
        self.inputs = ""
        self.was_right = True
        self._technique, self._programs = technique, programs
        self._sure_steps = UNSURE_STEPS  # number of steps since an unexpected program was recognised

    def expect(self, program: Remembered | None) -> None:
        """Turn to the program that all ranks expect of the next step; None: keep what is in force."""
        if program is not None:
            self._programs.enter(program)
            self._technique.turn(program)
            self.running = lasting(program)
        self.program = self.under = program
        self.inputs = ""
        self._sure_steps += 1

    def recognise(self, inputs: str, notices_larger: bool) -> bool:
        """Turn to the program that begins with these inputs, on this rank alone.

        If only programs with smaller inputs are known, turn to the safest setting.

        Args:
            inputs: shapes and dtypes of the inputs of the step's first forward.
            notices_larger: False to stay with the expected program if its inputs were smaller.

        Returns:
            Whether the step is taken for another program than expected.
        """
        expected, self.inputs = self._programs.current, inputs
        known = self._programs.beginning_with(inputs)
        if expected in known:
            return False
        if not known and not (notices_larger and expected.is_smaller(inputs, self._programs.limits[0])):
            return False
        self.program = program = known[-1] if known else None
        self._sure_steps = 0
        if self._technique.turn_freely(program):
            self.under, self.running = program, lasting(program) if program is not None else None
        elif program is not None and program.is_settled and expected.is_settled:
            self.running = Lasting(program, expected.decisions)
        else:
            self.running = None
        return True

    @property
    def is_unsure(self) -> bool:
        """Return whether unexpected programs came lately, so that the next step may run one too."""
        return self._sure_steps < UNSURE_STEPS
