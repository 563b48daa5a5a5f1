"""The changes of a session's programs: kept for reports, and logged once each, on rank 0."""

from __future__ import annotations

import collections
import logging

from memplug.errors import coded
from memplug.session.ranks import Ranks
from memplug.session.remembered import Remembered
from memplug.session.table import Stage

log = logging.getLogger("memplug")

LONGEST_HISTORY = 1000
MOST_TOLD = 16  # programs whose changes are logged at INFO
RETURN = "return"


class ProgramHistory:
    """The last thousand changes.

    Args:
        ranks: the ranks that train the model; the first of them logs.

    Attributes:
        changes: the changes, the latest at the end: (step, stage, index of the program, reason).
        step: number of the step that ended last.
    """

    def __init__(self, ranks: Ranks):
        self.changes: collections.deque[tuple[int, Stage, int, str]] = collections.deque(maxlen=LONGEST_HISTORY)
        self.step = 0
        self._ranks = ranks
        self._programs = 0  # number of programs that the history has noted

    def tell(self, stage: Stage, text: str, level: int = logging.INFO) -> None:
        """Log one line, on rank 0 only.

        Args:
            stage: the stage to name before the text.
            text: the line.
            level: level of `logging`.
        """
        if self._ranks.first:
            log.log(level, "memplug: %s: %s", stage.value, text)

    def note(self, program: Remembered, reason: str, news: bool = True, what: object = None) -> None:
        """Record a change of a program, and log it.

        The first change of each kind is logged at INFO for the first `MOST_TOLD` programs, all else at DEBUG.

        Args:
            program: the program.
            reason: the reason, for the history and the log.
            news: False to log at DEBUG in any case.
            what: the kind of change; None: that it entered its present stage.
        """
        what = program.stage if what is None else what
        self.changes.append((self.step, program.stage, program.index, reason))
        self._programs += not program.told
        news = news and what not in program.told and self._programs <= MOST_TOLD
        program.told.add(what)
        self.tell(program.stage, f"step {self.step}: {reason}", logging.INFO if news else logging.DEBUG)

    def note_return(self, program: Remembered) -> None:
        """Record the first time that a settled program runs again after others."""
        if RETURN not in program.told:
            plan = "under its plan" if program.decisions is not None else "at the safest setting"
            self.note(program, f"{named(program)} again, {plan}", what=RETURN)

    def warn_of_one_plan(self, change: str) -> None:
        """Warn that from now on every step counts as the same program, since no program repeats."""
        self._warn(
            "step %d: no program repeats often enough to be planned for; the last change: %s. From now on one plan "
            "serves all steps, and keeps nothing on the device. To plan for each program, raise "
            '"profiler": {"length_tolerance"}',
            change,
        )

    def warn_of_safest(self, program: Remembered) -> None:
        """Warn that a program stays at the safest setting, since plans make another program of it."""
        self._warn(
            "step %d: each plan for %s makes another program of it: its operators change although its inputs do not. "
            "memplug makes no more plans for it, and keeps it at the safest setting, which swaps the inputs of regions "
            'and recomputes the rest. Raise "profiler": {"length_tolerance"}, or set "tokenwise": {"alpha"} to a '
            "number",
            named(program),
        )

    def _warn(self, text: str, about: str) -> None:
        if self._ranks.first:
            log.warning(coded("MP009", f"memplug: {text}"), self.step, about)


def named(program: Remembered) -> str:
    """Return a program in words, such as "program 0 (1,166 operators)"."""
    operators = program.baseline.operators
    return f"program {program.index}" + ("" if operators is None else f" ({len(operators):,} operators)")
