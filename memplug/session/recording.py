"""Records steps of a session, and saves or hands on their traces."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from memplug.errors import MemplugError, RecorderError, TraceError, coded
from memplug.profile.recorder import Detail, Recorder
from memplug.profile.trace import Fingerprint, Layer, Pass, Trace
from memplug.profile.trace_file import save

log = logging.getLogger("memplug")


class PlaceSource(Protocol):
    """Reports to the recorder where in the program training is; see `memplug.hooks.places`."""

    layers: Sequence[Layer]
    gradients_stay: bool

    def install(self) -> None:
        """Start reporting."""

    def remove(self) -> None:
        """Stop reporting."""

    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of the job, and of the inputs of all forwards since `install`."""

    def begin_forward(self, module: Any, args: Any, kwargs: Any) -> None:
        """Report that a forward of the model begins."""

    def in_optimizer(self) -> AbstractContextManager[None]:
        """Return a context whose operators are reported as those of the optimizer."""


class Recording:
    """Records whole steps: the session asks for them, and calls `begin_step` and `end_step` at the boundaries.

    Args:
        recorder: the recorder of the process.
        places: reports where in the program training is.

    Attributes:
        trace: trace of the last step recorded with `Detail.TENSORS`; None until there is one.
        step_trace: the trace of the step that ended last, if `begin_step` was told to make one; else None.
        peak_bytes: largest memory in use during the step that ended last; None if it was not recorded.
        placed: True while `places` reports to the recorder.
        able: False once the recorder has refused to record.
        steps: number of recorded steps.
    """

    def __init__(self, recorder: Recorder, places: PlaceSource):
        self.recorder = recorder
        self.trace: Trace | None = None
        self.step_trace: Trace | None = None
        self.peak_bytes: int | None = None
        self._places = places
        self._wanted: list[Path | None] = []
        self._files: list[Path | None] = []
        self._detail: Detail | None = None
        self._traced = self._has_refused = False
        self.placed = False
        self.able = True
        self.steps = 0

    @property
    def gradients_stay(self) -> bool:
        """Return whether parameters had gradients when the last recorded step began."""
        return self._places.gradients_stay

    @property
    def here(self) -> tuple[str, str | None]:
        """Return the pass (in words) and the layer that the calling thread is in; the layer is None if unknown."""
        which, _, layer = self.recorder.here()
        name = self._places.layers[layer].name if self.placed and 0 <= layer < len(self._places.layers) else None
        return Pass(which).name.lower().replace("_", " "), name

    def begin_forward(self, module: Any, args: Any, kwargs: Any) -> None:
        """Report the running forward: `places` was installed during it, so its hooks missed the beginning."""
        if self.placed:
            self._places.begin_forward(module, args, kwargs)

    def in_optimizer(self) -> AbstractContextManager[None]:
        """Return a context whose operators are reported as those of the optimizer, if `places` reports at all."""
        return self._places.in_optimizer() if self.placed else contextlib.nullcontext()

    def want(self, file: Path | None) -> None:
        """Record the next whole step with `Detail.TENSORS`, and save it in `file` unless that is None."""
        self._wanted.append(file)

    def end_step(self) -> None:
        """End the recording of the step, if it was recorded, and take its trace and peak."""
        detail, self._detail, self.peak_bytes, self.step_trace = self._detail, None, None, None
        if detail is None:
            return
        self.steps += 1
        self.peak_bytes = self.recorder.peak_bytes
        if detail is not Detail.TENSORS and not self._traced:
            self.recorder.drop()
            return
        try:
            trace = self.recorder.end(self._places.fingerprint(), self._places.layers)
        except TraceError as error:
            self.refuse(error)
            return
        self.step_trace = trace if self._traced else None
        if detail is Detail.TENSORS:
            self.trace = trace
        for file in filter(None, self._files):
            self._save(file)

    def begin_step(self, detail: Detail | None, *, traced: Detail | None = None, placed: bool = False) -> None:
        """Begin a step; record it in the most detail that `want` or an argument asks for, or not at all.

        Args:
            detail: the least detail to record the step in; None if this caller needs no record.
            traced: the least detail that `step_trace` needs; None if no `step_trace` is wanted.
            placed: True to report the places in the program even if the step is not recorded.
        """
        self._files, self._wanted = self._wanted, []
        self._traced = traced is not None
        asked = (detail, traced, Detail.TENSORS if self._files else None)
        detail = max((each for each in asked if each is not None), default=None)
        detail = detail if self.able and self._begin(detail) else None
        self.placed = detail is not None or placed
        if detail is None and placed:
            self.recorder.forget()
        if self.placed:
            self._places.install()
        else:
            self._places.remove()
        self._detail = detail

    def begin_again(self, detail: Detail | None, *, traced: Detail | None = None, placed: bool = False) -> bool:
        """Begin the step's record anew, at its first forward, since it runs another program than expected.

        A record that is to be saved goes on. Places are reported on if they were before.

        Args:
            detail: see `begin_step`.
            traced: see `begin_step`.
            placed: see `begin_step`.

        Returns:
            Whether places are reported from now on, and were not before.
        """
        was_placed = self.placed
        if self._files:
            self._traced = traced is not None
        else:
            if self._detail is not None:
                self.recorder.drop()
                self._detail = None
            self.begin_step(detail, traced=traced, placed=placed or was_placed)
        return self.placed and not was_placed

    def _begin(self, detail: Detail | None) -> bool:
        if detail is None:
            return False
        try:
            self.recorder.begin(detail)
        except RecorderError as error:
            self.able = False
            log.warning("memplug: steps cannot be recorded: %s", error)
        return self.able

    def refuse(self, error: TraceError) -> None:
        """Continue without the record of this step, because the record contradicts itself; warn the first time."""
        if not self._has_refused:
            self._has_refused = True
            text = "memplug: the record of a step contradicts itself: %s. memplug uses a later step; please report this"
            log.warning(coded("MP016", text), error.problem)

    def stop(self) -> None:
        """Stop recording and reporting for good: the session is detached."""
        self._places.remove()
        self.placed = False
        self._detail = None
        self.recorder.stop()

    def _save(self, file: Path) -> None:
        # unlike `Path.exists`, `os.path.exists` raises nothing if the folder is not accessible
        replaced = ", in place of an earlier one" if os.path.exists(file) else ""
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            save(self.trace, file)
        except (OSError, MemplugError) as error:  # a full disk must not end the training
            log.warning("memplug: the trace of this step was not saved in %s: %s. Choose another folder", file, error)
        else:
            log.info("memplug: a trace of this step is in %s%s: see `memplug show`", file, replaced)


def of_rank(file: Path) -> Path:
    """Return this rank's own name for a file if there are several ranks: "trace.rank0.npz" for "trace.npz"."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return file
    return file.with_name(f"{file.stem}.rank{dist.get_rank()}{file.suffix}")


def unused(file: Path) -> Path:
    """Return `file`, or if an earlier run wrote it, the first free name of "trace-2.npz", "trace-3.npz" and so on."""
    others = (file.with_name(f"{file.stem}-{run}{file.suffix}") for run in itertools.count(2))
    return next(name for name in itertools.chain([file], others) if not os.path.exists(of_rank(name)))
