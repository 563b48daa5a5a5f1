"""Which steps of a session are recorded, and what becomes of the traces."""

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
    """Tells the recorder where training is; see `memplug.hooks.places`."""

    layers: Sequence[Layer]
    gradients_stay: bool

    def install(self) -> None:
        """From now on."""

    def remove(self) -> None:
        """No more."""

    def fingerprint(self) -> Fingerprint:
        """Of what ran since `install`."""

    def begin_forward(self, module: Any, args: Any, kwargs: Any) -> None:
        """A forward of the model begins."""

    def in_optimizer(self) -> AbstractContextManager[None]:
        """Returns a context whose operators belong to the optimizer."""


class Recording:
    """Begins and ends at the boundaries between steps; the session asks, and says where they are.

    Args:
        recorder: that sees everything.
        places: of the model.

    Attributes:
        trace: of the last step that was recorded in detail; None so far.
        step_trace: of the step that ended last, where a trace of it was asked for; else None.
        peak_bytes: largest memory in use in the step that ended last; None where it was not recorded.
        placed: the recorder is told where in the program training is.
        able: steps can be recorded, as far as is known.
        steps: how many were recorded.
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
        """Parameters had gradients as the last step that was recorded began."""
        return self._places.gradients_stay

    @property
    def here(self) -> tuple[str, str | None]:
        """Which pass the calling thread is in, for people; and in which layer, None where that is not known."""
        which, _, layer = self.recorder.here()
        name = self._places.layers[layer].name if self.placed and 0 <= layer < len(self._places.layers) else None
        return Pass(which).name.lower().replace("_", " "), name

    def begin_forward(self, module: Any, args: Any, kwargs: Any) -> None:
        """A forward of the model has begun, before the recorder was told where training is."""
        if self.placed:
            self._places.begin_forward(module, args, kwargs)

    def in_optimizer(self) -> AbstractContextManager[None]:
        """Returns a context whose operators belong to the optimizer, where the recorder is told where training is."""
        return self._places.in_optimizer() if self.placed else contextlib.nullcontext()

    def want(self, file: Path | None) -> None:
        """Record the next whole step in detail, and save it there unless that is None."""
        self._wanted.append(file)

    def end_step(self) -> None:
        """A step is over."""
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
        """A step begins.

        Args:
            detail: to record it in, None: not at all, unless `want` was called.
            traced: `step_trace` is wanted of it, in this detail at least; None: it is not.
            placed: the recorder is told where in the program training is, recorded or not.
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
        """Go on without the record of a step that contradicts itself."""
        if not self._has_refused:
            self._has_refused = True
            text = "memplug: the record of a step contradicts itself: %s. A later one is used; please report it"
            log.warning(coded("MP016", text), error.problem)

    def stop(self) -> None:
        """The session is detached: nothing is left behind."""
        self._places.remove()
        self.placed = False
        self._detail = None
        self.recorder.stop()

    def _save(self, file: Path) -> None:
        # unlike Path's own `exists`, this one raises nothing where the folder cannot be looked into
        replaced = ", in place of an earlier one" if os.path.exists(file) else ""
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            save(self.trace, file)
        except (OSError, MemplugError) as error:  # a full disk must not end the training
            log.warning("memplug: the trace of this step was not saved in %s; choose another folder: %s", file, error)
        else:
            log.info("memplug: a trace of this step is in %s%s: see `memplug show`", file, replaced)


def of_rank(file: Path) -> Path:
    """The file of this rank where there are several: "trace.npz" becomes "trace.rank0.npz"."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return file
    return file.with_name(f"{file.stem}.rank{dist.get_rank()}{file.suffix}")


def unused(file: Path) -> Path:
    """The file, or where an earlier run left one of that name, the first free one of "trace-2.npz", "trace-3.npz"."""
    others = (file.with_name(f"{file.stem}-{run}{file.suffix}") for run in itertools.count(2))
    return next(name for name in itertools.chain([file], others) if not os.path.exists(of_rank(name)))
