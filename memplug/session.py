"""One attached model: its regions, its executor, what tells where a step ends, and what it reports of itself.

Until there is a plan, every region runs at the safest setting: inputs and attention outputs swapped, every matmul
recomputed. With a number for alpha there is nothing to plan: the session is stable at once, and watches nothing.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from memplug import budgets, report
from memplug.adjuster import Adjuster
from memplug.config import MemplugConfig
from memplug.execute.device import Device
from memplug.execute.frame import Frame
from memplug.execute.tokenwise import Executor, Region
from memplug.plan import tokenwise as plan
from memplug.profile.similarity import Program
from memplug.stages import Stage

__all__ = ["Recorder", "Session", "Stage", "initial_regions"]

log = logging.getLogger("memplug")

RECENT_STEPS = 50
FORWARDS_WITHOUT_STEP = 100  # of each region, after which `step()` seems to have been forgotten


class Recorder(Protocol):
    """Sees the operators of this process, but for memplug's own, such as those of recompute passes."""

    def take(self) -> np.ndarray:
        """Numbers of the operators since the last call, in order, int32."""

    def stop(self) -> None:
        """See nothing any more."""


class Session:
    """Made by `memplug.attach`. A context manager: leaving it detaches.

    Args:
        config: the block.
        regions: the modules' regions, in forward order.
        device: where they run.
        regathers: forward gathers parameters (ZeRO 3).

    Attributes:
        step_peak: returns the largest allocation total of the device since it was called last, in bytes; None where
            that is unknown.
    """

    def __init__(self, config: MemplugConfig, regions: Sequence[Region], device: Device, regathers: bool = False):
        self.config = config
        self.regions = list(regions)
        self.device = device
        host_bytes = budgets.host_budget_bytes(config)
        self.executor = Executor(device, host_bytes, config.tokenwise.min_offload_bytes, regathers)
        self.executor.guard = self.explaining
        self.steps = 0
        self.recorder: Recorder | None = None
        self.step_peak: Callable[[], int | None] = lambda: None
        self.on_step: list[Callable[[Session], None]] = []
        self._undo: list[Callable[[], None]] = []
        self._step_seconds: collections.deque[float] = collections.deque(maxlen=RECENT_STEPS)
        self._last_step: float | None = None
        begin = Stage.WARM_UP if self._plans else Stage.STABLE
        self._adjuster = Adjuster(config, self.regions, self.executor, begin, lambda: self.step_peak())
        if self._plans:
            self.executor.on_frame = self._observe
            self._adjuster.tell(f"{len(self.regions)} regions, planned for once the program repeats")
        else:
            self._adjuster.tell(f"{len(self.regions)} regions, alpha {config.tokenwise.alpha}")

    # -- what users call -----------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Mark the end of a training step (of the optimizer, not of a micro-batch), on every rank.

        Hooked hosts call it themselves.
        """
        if self.stage is Stage.DETACHED:
            return
        self.steps += 1
        self.executor.transfer.drain()
        self._time_step()
        if self._plans:
            program = Program(self._take_operators(), self._adjuster.observer.take_sizes())
            self._adjuster.end_step(self.steps, program)
        for callback in self.on_step:
            callback(self)
        self._take_operators()  # what ran here is no part of a step
        self._adjuster.begin_step()

    def report(self) -> dict[str, Any]:
        """Counters and predictions: bytes, seconds and counts, by name.

        `step_s` is the median of the last steps, from one `step()` to the next; `predicted_*` come from the plan and
        are None before there is one; `program` is the index of the current one among the `programs` remembered, and
        `replans` counts how often a plan was made.
        """
        solution, programs = self.solution, self._adjuster.programs
        return {
            "stage": self.stage.value,
            "steps": self.steps,
            "regions": len(self.regions),
            "alpha": self.config.tokenwise.alpha,
            "program": programs.current.index if programs.current else None,
            "programs": len(programs),
            "replans": self._adjuster.replans,
            "swapped_fraction": self._swapped_fraction(),
            "step_s": statistics.median(self._step_seconds) if self._step_seconds else None,
            "predicted_regions_s": solution.step_s if solution else None,
            "predicted_host_bytes": solution.host_bytes if solution else None,
            "predicted_kept_bytes": solution.device_bytes if solution else None,
            "predicted_peak_bytes": self._adjuster.policy.peak_bytes if solution else None,
            "bound": solution.bound if solution else None,
            **report.counters(self.executor),
        }

    def detach(self) -> None:
        """Undo every patch and give all memory back, on every rank; a second call does nothing.

        Run backward on graphs in flight first.
        """
        if self.stage is Stage.DETACHED:
            return
        self._adjuster.close()
        while self._undo:
            self._undo.pop()()
        if self.recorder is not None:
            self.recorder.stop()
        self.executor.on_frame = None
        self.executor.close()
        self._adjuster.tell(f"after {self.steps} steps")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.detach()

    @property
    def stage(self) -> Stage:
        """Where the session stands."""
        return self._adjuster.stage

    @property
    def history(self) -> list[tuple[int, Stage, int, str]]:
        """(step, stage, index of the program, why) of each change of stage or program, the last thousand of them."""
        return list(self._adjuster.history)

    @property
    def solution(self) -> plan.TokenwisePlan | None:
        """The plan in force; None without one, and while plans are tried."""
        return self._adjuster.policy.solution if self._adjuster.policy else None

    # -- what hooks call -----------------------------------------------------------------------------------------------

    @property
    def wants_recorder(self) -> bool:
        """Whether `watch` has a use for a recorder."""
        return self.stage not in (Stage.OFF, Stage.DETACHED) and self._plans and self.config.profiler.enabled

    def watch(self, recorder: Recorder) -> None:
        """Compare the operators of steps too, from the next step on; stopped when the session detaches."""
        assert self.wants_recorder and self.recorder is None, "ask `wants_recorder`, and watch once"
        self.recorder = recorder

    def at_detach(self, undo: Callable[[], None]) -> None:
        """Register how to undo a patch; undone in reverse order."""
        self._undo.append(undo)

    @contextlib.contextmanager
    def explaining(self, phase: str, region: Region | None = None) -> Iterator[None]:
        """A device out-of-memory error that passes gets a note of what memplug knew."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            name = region.name if region else None
            peak_bytes = budgets.peak_bytes(self.device)
            report.add_note(error, report.out_of_memory_note(phase, name, self.report(), peak_bytes))
            raise

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _observe(self, frame: Frame) -> None:
        self._adjuster.observer(frame)
        if not self.steps and self.executor.frames == FORWARDS_WITHOUT_STEP * len(self.regions):
            log.warning(
                "memplug: %d forwards of each region and no end of a step: call session.step() after optimizer.step()",
                FORWARDS_WITHOUT_STEP,
            )

    @property
    def _plans(self) -> bool:
        return self.config.tokenwise.alpha == "auto"

    def _take_operators(self) -> Sequence[int] | np.ndarray:
        return self.recorder.take() if self.recorder is not None else ()

    def _time_step(self) -> None:
        now = time.perf_counter()
        if self._last_step is not None:
            self._step_seconds.append(now - self._last_step)
        self._last_step = now

    def _swapped_fraction(self) -> float | None:
        if not self._plans:
            return float(self.config.tokenwise.alpha)
        return statistics.fmean(region.rows for region in self.regions) if self.solution and self.regions else None


def initial_regions(config: MemplugConfig, named_kinds: Sequence[tuple[str, str]]) -> list[Region]:
    """Regions at the policy they start with: the block's alpha, or the safest setting until there is a plan.

    Args:
        named_kinds: (qualified name, class name) of each module.
    """
    alpha = config.tokenwise.alpha
    return [Region(name, kind, rows=0.0 if alpha == "auto" else float(alpha)) for name, kind in named_kinds]
