"""What `memplug.attach` returns: a model's session, as its user sees it, or one that is off."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memplug.config import MemplugConfig
from memplug.errors import RecorderError
from memplug.files import path_of
from memplug.profile.trace import Trace
from memplug.session.attached import AttachedModel
from memplug.session.recording import of_rank
from memplug.session.report import Report
from memplug.session.table import Stage
from memplug.session.techniques import reports

log = logging.getLogger("memplug")


class Session:
    """Made by `memplug.attach`. A context manager: leaving it detaches.

    Attributes:
        config: the block.
        on_step: called with the session once a step has ended.
    """

    def __init__(self, attached: AttachedModel):
        self.config = attached.config
        self.on_step: list[Callable[[Session], None]] = []
        self._attached = attached
        attached.session = self
        attached.on_step.append(self._call)

    def step(self) -> None:
        """Mark the end of a training step (of the optimizer, not of a micro-batch), on every rank.

        Frameworks with a hook call it themselves.
        """
        self._attached.step()

    @property
    def steps(self) -> int:
        """How many ended."""
        return self._attached.steps

    def record(self, file: str | Path | None = None) -> None:
        """Record the next whole step, from the end of this one on: `trace` has it then.

        Args:
            file: also save it there, for `memplug show`; with several ranks each has its own, as in
                "trace.rank0.npz" for "trace.npz".

        Raises:
            RecorderError: another session of this process has the recorder, or this one is detached; or `file` is no
                path.
        """
        if self.stage is Stage.DETACHED:
            raise RecorderError("a session that is detached records nothing", "Attach again.")
        self._attached.boundary.demand_recording().want(_trace_file(file))

    @property
    def trace(self) -> Trace | None:
        """Of the last step that was recorded in detail, because of `record` or to plan from; None so far."""
        recording = self._attached.boundary.recording
        return recording.trace if recording is not None else None

    def report(self) -> Report:
        """Returns what the session did so far, holds now and predicts: see `Report`."""
        return self._attached.report()

    def detach(self) -> None:
        """Undo every patch and give all memory back, on every rank; a second call does nothing.

        Run backward on graphs in flight first.
        """
        self._attached.detach()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.detach()

    @property
    def stage(self) -> Stage:
        """Where the session stands."""
        return self._attached.stage

    @property
    def history(self) -> list[tuple[int, Stage, int, str]]:
        """(step, stage, index of the program, why) of each change of stage or program, the last thousand of them."""
        return self._attached.history

    @property
    def solution(self) -> Any:
        """The plan in force (`TokenwisePlan`); None without one, and while plans are tried."""
        decisions = self._attached.boundary.adjuster.decisions
        return decisions.solution if decisions else None

    def _call(self) -> None:
        for callback in self.on_step:
            callback(self)


class Disabled(Session):
    """Returned where the block is absent or switched off: nothing is hooked, patched or allocated."""

    def __init__(self, config: MemplugConfig):
        self.config = config
        self.on_step: list[Callable[[Session], None]] = []
        self._steps = 0

    def step(self) -> None:
        """Call what was to be called at the end of steps."""
        self._steps += 1
        self._call()

    @property
    def steps(self) -> int:
        """How many ended."""
        return self._steps

    def record(self, file: str | Path | None = None) -> None:
        """Say that no step is recorded.

        Raises:
            RecorderError: `file` is no path.
        """
        _trace_file(file)
        log.warning('memplug is off, so no step is recorded; set "memplug": {"enabled": true}')

    @property
    def trace(self) -> None:
        """None: no step is recorded."""

    def report(self) -> Report:
        """Says that memplug is off."""
        why = "memplug is off"
        return Report(stage=self.stage.value, profiler_off_because=why, techniques=reports(None, (), lambda name: why))

    def detach(self) -> None:
        """Do nothing: there is nothing to undo."""

    @property
    def stage(self) -> Stage:
        """Off, also once it is detached."""
        return Stage.OFF

    @property
    def history(self) -> list[tuple[int, Stage, int, str]]:
        """Empty: the stage never changes."""
        return []

    @property
    def solution(self) -> None:
        """None: nothing is planned."""


def _trace_file(file: str | Path | None) -> Path | None:
    return None if file is None else of_rank(path_of(file, "trace (.npz)", RecorderError))
