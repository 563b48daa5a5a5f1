"""The program that a rank takes a step for: the one that all ranks expect, or one that it recognises by the inputs."""

from __future__ import annotations

from typing import Any

from memplug.session.lasting import Lasting, lasting
from memplug.session.programs import Programs
from memplug.session.remembered import Remembered
from memplug.session.table import Stage
from memplug.session.technique import AgreedTechnique

UNSURE_STEPS = 16  # a rank that recognised an unexpected program is unsure of what is expected for so many steps


class TakenProgram:
    """The program of the step that runs or is about to.

    Args:
        technique: the technique that turns to the program.
        programs: the programs that the session remembers.
        running: see below, while there are no programs.
        is_shared: whether there are other ranks.

    Attributes:
        program: the program; None while it is unknown.
        under: the program by whose settings all regions run: `program`, or while it has no plan, a larger one of its
            family; None: by those of no program.
        running: the program with the decisions that regions run under; None while it is not stable.
        inputs: the inputs that the step began with; "" if unknown.
        is_shared: whether there are other ranks.
        is_recognised: whether the inputs that the step began with fit a known program under which it runs.
        was_right: whether the step that ended was, by this rank's vote, one of the program that it was taken for.
    """

    def __init__(self, technique: AgreedTechnique[Any], programs: Programs, running: Lasting | None, is_shared: bool):
        self.program: Remembered | None = None
        self.under: Remembered | None = None
        self.running = running
        self.inputs = ""
        self.was_right = True
        self.is_recognised = False
        self._technique, self._programs, self.is_shared = technique, programs, is_shared
        self._sure_steps = UNSURE_STEPS  # number of steps since an unexpected program was recognised

    def expect(self, program: Remembered | None) -> None:
        """Turn to the program that all ranks expect of the next step; None: keep what is in force."""
        under = program
        if program is not None:
            self._programs.enter(program)
            under = self._programs.covering(program)
            self._technique.turn(under)
            self.running = lasting(under)
        self.program, self.under = program, under
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
        if known and self._programs.is_mixed(known[-1].family):
            known = self._programs.members(known[-1].family)[-1:]
        self.is_recognised = bool(known)
        if expected in known:
            return False
        if not known and not (notices_larger and expected.is_smaller(inputs, self._programs.limits[0])):
            return False
        program = known[-1] if known else None
        covers = program is not None and self._programs.covers(expected, program)
        if covers and self.is_shared and expected.stage is Stage.GEN_POLICY:
            return False  # a step of another rank may be larger: all ranks search for the expected program together
        under = self._programs.covering(program) if program is not None else None
        if under is self.under:
            self.program = program
            return False
        if self._technique.turn_freely(under):
            self.under, self.running = under, lasting(under) if under is not None else None
        elif covers:
            return False
        elif program is not None and program.is_settled and expected.is_settled:
            self.running = Lasting(program, expected.decisions)
        else:
            self.running = None
        self.program, self._sure_steps = program, 0
        return True

    @property
    def is_own(self) -> bool:
        """Return whether the step runs by its own program's settings, not by those of a larger one of its family."""
        return self.running is None or self.running.program is self.program

    @property
    def is_unsure(self) -> bool:
        """Return whether unexpected programs came lately, so that the next step may run one too."""
        return self._sure_steps < UNSURE_STEPS
