"""One attached model: its regions and executor, the ends of its steps, and its report.

The user holds a `memplug.session.session.Session`, which passes calls on to the `AttachedModel`.

Until there is a plan, every region runs at the safest setting: inputs and attention outputs are swapped, every matmul
is recomputed. If `tokenwise.alpha`, the fraction of rows to swap, is a number, regions need no plan: the session is
stable at once, and times a single step to check the number.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from memplug.config import MemplugConfig
from memplug.device.device import Device
from memplug.errors import coded
from memplug.session import closing, out_of_memory
from memplug.session.boundary import Boundary
from memplug.session.ranks import Ranks
from memplug.session.report import Report
from memplug.session.table import Stage
from memplug.session.techniques import reports
from memplug.torch_private import current_graph_task_id

log = logging.getLogger("memplug")

UNMARKED_FORWARDS = 100  # warn after so many forwards of the model without a `step()`


class AttachedModel:
    """An attached model, as hooks, regions and integrations see it.

    Args:
        config: the block.
        regions: the regions of the model, in forward order.
        device: the device that they run on.
        regathers: True if forward gathers parameters (ZeRO 3).
        ranks: the ranks that train the model; by default all.
        has_regions: True if this or another rank has regions; by default whether this one has.

    Attributes:
        session: the user's `Session`; None while attaching.
        boundary: runs the actions between two steps.
        agreed: the technique that decides how regions run.
        executor: runs the regions.
        plain: the regions that currently run as if memplug were absent.
        forwards: number of forwards with gradients, of regions and of the model.
        steps_are_marked: True if a hook marks the ends of steps, so that the user need not call `Session.step`.
        owner: the callback that attached the model and will detach it; None if the user does both.
        on_step: callbacks, each called after a step has ended.
    """

    def __init__(
        self,
        config: MemplugConfig,
        regions: Sequence[Any],
        device: Device,
        regathers: bool = False,
        ranks: Ranks | None = None,
        has_regions: bool | None = None,
    ):
        self.config = config
        self.ranks = Ranks() if ranks is None else ranks
        self.regions = list(regions)
        self._unmarked_forwards = UNMARKED_FORWARDS * max(1, len(self.regions))
        self.device = device
        request_failed = weakref.WeakMethod(self._request_failed)  # the native core must not keep the model alive
        self.boundary = Boundary(
            config,
            self.regions,
            device,
            regathers,
            self.ranks,
            self._explain,
            lambda: "" if (explain := request_failed()) is None else explain(),
            bool(self.regions) if has_regions is None else has_regions,
        )
        self.agreed = self.boundary.agreed
        self.executor, self.plain = self.agreed.executor, self.agreed.plain
        self.session: Any = None
        self.owner: Any = None
        self.forwards = 0
        self.steps_are_marked = self._missed_steps = False
        self._told: set[str] = set()
        self.on_step: list[Callable[[], None]] = []
        self._undo: list[Callable[[], None]] = []
        self.at_detach(closing.at_exit(self))
        self.tell(self.agreed.beginning())

    # -- for hooks, and the user's session -----------------------------------------------------------------------------

    def step(self) -> None:
        """End a training step; see `Session.step`."""
        if self.stage is Stage.DETACHED:
            return
        self.boundary.end_step()
        for callback in self.on_step:
            callback()
        self.boundary.begin_step()

    @property
    def steps(self) -> int:
        """Return the number of steps that ended."""
        return self.boundary.steps

    def report(self) -> Report:
        """Return what the session did so far, holds now and predicts."""
        boundary = self.boundary
        claim, kept, recording, programs = boundary.claim, boundary.kept, boundary.recording, boundary.adjuster.programs
        return Report(
            stage=self.stage.value,
            steps=self.steps,
            program=programs.current.index if programs.current else None,
            programs=len(programs),
            replans=boundary.adjuster.replans,
            planned_steps=boundary.planned_steps,
            planning_stopped_because=boundary.apart or None,
            step_s=boundary.step_s,
            resumed_from=str(kept.file) if kept and kept.file else None,
            not_resumed_because=(kept.refused or None) if kept else None,
            recorded_steps=recording.steps if recording is not None else 0,
            profiler="operators" if recording is not None and boundary.watches else "sizes",
            profiler_off_because=(claim.profiler_off_because or None) if claim else None,
            techniques=reports(self.agreed, boundary.followers, claim.why_off if claim else lambda name: ""),
        )

    def detach(self) -> None:
        """Undo every patch and release all memory; see `Session.detach`."""
        if self.stage is Stage.DETACHED:
            return
        line = closing.line(self)
        self.boundary.close()
        while self._undo:
            self._undo.pop()()
        claim = self.boundary.claim
        if claim is not None:
            claim.release("the session is detached")
        self.agreed.close()
        if claim is not None:  # None if attaching failed
            self.tell(line)

    @property
    def stage(self) -> Stage:
        """Return the current stage of the session."""
        return self.boundary.adjuster.stage

    @property
    def history(self) -> list[tuple[int, Stage, int, str]]:
        """Return the recent changes of stage or program; see `Session.history`."""
        return list(self.boundary.adjuster.history.changes)

    @property
    def warmup_steps(self) -> int:
        """Return the number of further steps after which memplug plans for a program that it has seen once."""
        return self.boundary.adjuster.warmup_steps

    # -- for hooks alone -----------------------------------------------------------------------------------------------

    @property
    def wants_inputs(self) -> bool:
        """Return whether the session wants to know the inputs of the next forward of the model."""
        return not self.boundary.has_inputs and self.stage is not Stage.DETACHED

    def begin_inputs(self, inputs: str, *forward: Any) -> None:
        """Let the session recognise a step's program; call before the step's first forward with gradients.

        Args:
            inputs: shapes and dtypes of the forward's inputs.
            forward: the module, its arguments and its keyword arguments.
        """
        self.boundary.begin_inputs(inputs, *forward)

    def begin_forward(self) -> None:
        """Count a forward with gradients, of a region or the model; a step's program begins with the first of them."""
        self.forwards += 1
        if self.forwards == self._unmarked_forwards and not self.steps:
            self.miss_steps(f"{self.forwards:,} forwards with gradients have run")
        if self.boundary.in_program:
            return
        recomputes = current_graph_task_id() != -1  # a forward inside of a backward begins no program
        if not recomputes and self.stage is not Stage.DETACHED:
            self.boundary.begin_program()

    def miss_steps(self, seen: str) -> None:
        """Warn once that training runs, but nothing marks the ends of its steps.

        Args:
            seen: the sign that training runs, in words for the warning.
        """
        if self._missed_steps or self.steps_are_marked:
            return
        self._missed_steps = True
        text = "memplug: %s, and no step has ended: nothing is planned. Add `session.step()` after `optimizer.step()`"
        log.warning(coded("MP008", text), seen)

    def in_optimizer(self) -> AbstractContextManager[None]:
        """Return a context whose operators a recording attributes to the optimizer."""
        recording = self.boundary.recording
        return contextlib.nullcontext() if recording is None else recording.in_optimizer()

    def at_detach(self, undo: Callable[[], None]) -> None:
        """Register a function that undoes a patch; `detach` calls all such functions, the latest first."""
        self._undo.append(undo)

    @contextlib.contextmanager
    def explaining(self, phase: str) -> Iterator[None]:
        """Add memplug's note to a device out-of-memory error that leaves the context.

        Args:
            phase: "forward", "recompute", "backward" or "step".
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            self._explain(phase, None, error)
            raise

    def _explain(self, phase: str, region: Any, error: BaseException) -> None:
        if not out_of_memory.is_told(error):
            out_of_memory.add_note(error, self._out_of_memory(phase, region.name if region else None))

    def _request_failed(self) -> str:
        """Return the note for the error of a failed device memory request; called on the requesting thread."""
        recording = self.boundary.recording
        phase, layer = recording.here if recording is not None else ("a step", None)
        return self._out_of_memory(phase, layer)

    def _out_of_memory(self, phase: str, region: str | None) -> str:
        snapshot = out_of_memory.save_snapshot(self.config.report.snapshot_on_oom, self.device, self.steps + 1)
        asked_gib, is_bound = self.config.device_budget_gib, self.device.memory is None
        peak_bytes = self.device.memory.allocated_peak_bytes if self.device.memory is not None else None
        return out_of_memory.note(phase, region, self.report(), peak_bytes, asked_gib, is_bound) + snapshot

    def tell(self, text: str) -> None:
        """Log one line, on rank 0 only."""
        self.boundary.adjuster.tell(text)

    def tell_once(self, text: str) -> None:
        """Log one line as `tell` does, unless the session has logged it before."""
        if text not in self._told:
            self._told.add(text)
            self.tell(text)
