"""The sessions that `memplug.attach` returns: one for an attached model, one that does nothing if memplug is off."""

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
    """An attached model, as its user sees it; `memplug.attach` returns it.

    As a context manager, it detaches on exit.

    Attributes:
        config: the block.
        on_step: callbacks, each called with the session after a step has ended.
    """

    def __init__(self, attached: AttachedModel):
        self.config = attached.config
        self.on_step: list[Callable[[Session], None]] = []
        self._attached = attached
        attached.session = self
        attached.on_step.append(self._call)

    def step(self) -> None:
        """Mark the end of a training step; call it on every rank.

        A training step ends with the optimizer's step, not with a micro-batch. memplug makes this call itself under
        DeepSpeed's engine, in Megatron-LM's scripts and with the callbacks for Trainer and Lightning.
        """
        self._attached.step()

    @property
    def steps(self) -> int:
        """Return the number of steps that ended."""
        return self._attached.steps

    def record(self, file: str | Path | None = None) -> None:
        """Record the next whole step, which begins when the current one ends; afterwards `trace` returns it.

        Args:
            file: the file to save the trace in, for `memplug show`; None to save none. With several ranks each saves
                its own file, such as "trace.rank0.npz" for "trace.npz".

        Raises:
            RecorderError: another session of this process has the recorder, this session is detached, or `file` is not
                a valid path.
        """
        if self.stage is Stage.DETACHED:
            raise RecorderError("a session that is detached records nothing", "Attach again.")
        self._attached.boundary.demand_recording().want(_trace_file(file))

    @property
    def trace(self) -> Trace | None:
        """Return the trace of the last step that `record` or planning recorded in detail; None until there is one."""
        recording = self._attached.boundary.recording
        return recording.trace if recording is not None else None

    def report(self) -> Report:
        """Return what the session did so far, holds now and predicts."""
        return self._attached.report()

    def detach(self) -> None:
        """Undo every patch and release all memory; a second call does nothing.

        Call it on every rank, after backward has run on all graphs in flight.
        """
        self._attached.detach()

    def __enter__(self) -> Session:
        """Return the session itself; leaving the context detaches it."""
        return self

    def __exit__(self, *exception: Any) -> None:
        """Detach, also if the code in the context raised."""
        self.detach()

    @property
    def stage(self) -> Stage:
        """Return the current stage of the session."""
        return self._attached.stage

    @property
    def history(self) -> list[tuple[int, Stage, int, str]]:
        """Return the last thousand changes of stage or program, each as (step, stage, program index, reason)."""
        return self._attached.history

    @property
    def solution(self) -> Any:
        """Return the `TokenwisePlan` in force; None if there is none, and while plans are tried."""
        decisions = self._attached.boundary.adjuster.decisions
        return decisions.solution if decisions else None

    def _call(self) -> None:
        for callback in self.on_step:
            callback(self)


class Disabled(Session):
    """A session whose block is absent or switched off: it hooks, patches and allocates nothing."""

    def __init__(self, config: MemplugConfig):
        self.config = config
        self.on_step: list[Callable[[Session], None]] = []
        self._steps = 0

    def step(self) -> None:
        """Count the step, and call the callbacks in `on_step`."""
        self._steps += 1
        self._call()

    @property
    def steps(self) -> int:
        """Return the number of steps that ended."""
        return self._steps

    def record(self, file: str | Path | None = None) -> None:
        """Warn that no step is recorded, because memplug is off.

        Args:
            file: checked as in `Session.record`; nothing is written.

        Raises:
            RecorderError: `file` is not a valid path.
        """
        _trace_file(file)
        log.warning('memplug is off, so no step is recorded; set "memplug": {"enabled": true}')

    @property
    def trace(self) -> None:
        """Return None: no step is recorded."""

    def report(self) -> Report:
        """Return a report that says that memplug is off."""
        why = "memplug is off"
        return Report(stage=self.stage.value, profiler_off_because=why, techniques=reports(None, (), lambda name: why))

    def detach(self) -> None:
        """Do nothing: there is nothing to undo."""

    @property
    def stage(self) -> Stage:
        """Return `Stage.OFF`, also after `detach`."""
        return Stage.OFF

    @property
    def history(self) -> list[tuple[int, Stage, int, str]]:
        """Return an empty list: the stage never changes."""
        return []

    @property
    def solution(self) -> None:
        """Return None: nothing is planned."""


def _trace_file(file: str | Path | None) -> Path | None:
    return None if file is None else of_rank(path_of(file, "trace (.npz)", RecorderError))
