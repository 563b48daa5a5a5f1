"""One attached model: its regions, its executor, and the stages that lead to a plan. The only place where stages meet.

    warm-up ──first step──► observe ──one timed step──► stable

Until the plan is there, every region runs at the safest setting: inputs and attention outputs swapped, every matmul
recomputed. With a number for alpha there is nothing to observe: the session is stable at once.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from memplug import planning, report
from memplug.config import MemplugConfig
from memplug.execute.device import Device
from memplug.execute.frame import Frame
from memplug.execute.tokenwise import Executor, Region
from memplug.plan import tokenwise as plan
from memplug.profile.hardware import host_available_bytes, measure_links

log = logging.getLogger("memplug")

HOST_SHARE = 0.8  # of the memory that is available now, shared by the processes of this machine
DEVICE_SHARE = 0.92  # of the device's memory, that a plan may fill
RECENT_STEPS = 50
# processes of this machine, as torchrun, DeepSpeed's launcher, Open MPI, MVAPICH and Slurm tell them
LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
)
FORWARDS_WITHOUT_STEP = 100  # of each region, after which `step()` seems to have been forgotten


class Stage(enum.Enum):
    """Where a session stands."""

    OFF = "off"
    WARM_UP = "warm-up"
    OBSERVE = "observe"
    STABLE = "stable"
    DETACHED = "detached"


class Session:
    """Made by `memplug.attach`. A context manager: leaving it detaches.

    Args:
        config: the block.
        regions: the modules' regions, in forward order.
        device: where they run.
        regathers: forward gathers parameters (ZeRO 3).
    """

    def __init__(self, config: MemplugConfig, regions: Sequence[Region], device: Device, regathers: bool = False):
        self.config = config
        self.regions = list(regions)
        self.device = device
        self.executor = Executor(device, self._host_budget_bytes(), config.tokenwise.min_offload_bytes, regathers)
        self.executor.guard = self.explaining
        self.steps = 0
        self.solution: plan.TokenwisePlan | None = None
        self._predicted_peak_bytes: int | None = None
        self.on_step: list[Callable[[Session], None]] = []
        self._undo: list[Callable[[], None]] = []
        self._observer = planning.Observer()
        self._step_seconds: list[float] = []
        self._last_step: float | None = None
        self._warned_idle = False
        self.stage = Stage.WARM_UP if config.tokenwise.alpha == "auto" else Stage.STABLE
        if self.stage is Stage.STABLE:
            self._log(f"{len(self.regions)} regions, alpha {config.tokenwise.alpha}")
        else:
            self.executor.on_frame = self._observe
            self._log(f"{len(self.regions)} regions, planned after two steps")

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
        if self.stage is Stage.WARM_UP:
            self.stage = Stage.OBSERVE
            self.executor.timing = True
            self._log("one step with device times around every operator")
        elif self.stage is Stage.OBSERVE:
            self._plan()
        for callback in self.on_step:
            callback(self)

    def report(self) -> dict[str, Any]:
        """Counters and predictions: bytes, seconds and counts, by name.

        `step_s` is the median of the last steps, from one `step()` to the next; `predicted_*` come from the plan and
        are None before there is one.
        """
        solution = self.solution
        return {
            "stage": self.stage.value,
            "steps": self.steps,
            "regions": len(self.regions),
            "alpha": self.config.tokenwise.alpha,
            "swapped_fraction": self._swapped_fraction(),
            "step_s": statistics.median(self._step_seconds) if self._step_seconds else None,
            "predicted_regions_s": solution.step_s if solution else None,
            "predicted_host_bytes": solution.host_bytes if solution else None,
            "predicted_kept_bytes": solution.device_bytes if solution else None,
            "predicted_peak_bytes": self._predicted_peak_bytes,
            "bound": solution.bound if solution else None,
            **report.counters(self.executor),
        }

    def detach(self) -> None:
        """Undo every patch and give all memory back; a second call does nothing.

        Run backward on graphs in flight first.
        """
        if self.stage is Stage.DETACHED:
            return
        self.stage = Stage.DETACHED
        while self._undo:
            self._undo.pop()()
        self.executor.on_frame = None
        self.executor.close()
        self._log(f"after {self.steps} steps")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.detach()

    # -- what hooks call -----------------------------------------------------------------------------------------------

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
            report.add_note(error, report.out_of_memory_note(phase, name, self.report(), self._peak_bytes()))
            raise

    # -- stages --------------------------------------------------------------------------------------------------------

    def _observe(self, frame: Frame) -> None:
        self._observer(frame)
        if not self.steps and self.executor.frames == FORWARDS_WITHOUT_STEP * len(self.regions):
            log.warning(
                "memplug: %d forwards of each region and no end of a step: call session.step() after optimizer.step()",
                FORWARDS_WITHOUT_STEP,
            )

    def _plan(self) -> None:
        self.device.synchronize()
        groups = planning.group_regions(self.regions, self._observer)
        described = planning.describe(groups, self._observer, self.executor, self.device.seconds_between)
        self.solution = planning.agree((described, self._budget()), _gather)
        if self.solution is None:  # a rank ran no region in this step
            if not groups and not self._warned_idle:
                self._warned_idle = True
                log.warning("memplug: no region ran in step %d, for example %s", self.steps, self.regions[0].name)
            return
        self.executor.timing = False
        self.executor.on_frame = None
        peak_bytes = self._peak_bytes()
        if peak_bytes is not None:
            self._predicted_peak_bytes = peak_bytes + self.solution.device_bytes
        planning.apply(self.solution, groups, self._observer)
        self.executor.pool.reserve(self.solution.host_bytes)
        self._observer = planning.Observer()
        self.stage = Stage.STABLE
        self._log(self._summary())

    def _budget(self) -> plan.Budget:
        d2h, h2d = measure_links(torch.device(self.device.kind), size_bytes=64 << 20)
        return plan.Budget(
            d2h_bytes_per_s=d2h,
            h2d_bytes_per_s=h2d,
            host_bytes=self.executor.pool.budget_bytes,
            device_bytes=self._device_room_bytes(),
        )

    def _host_budget_bytes(self) -> int:
        if self.config.host_budget_gib != "auto":
            return int(self.config.host_budget_gib * report.GIB)
        processes = next((os.environ[name] for name in LOCAL_SIZES if os.environ.get(name, "").isdigit()), "1")
        return int(host_available_bytes() * HOST_SHARE / int(processes))

    def _device_room_bytes(self) -> int:
        """What a plan may keep on the device: the budget less the peak of the step at the safest setting.

        On the CPU "auto" keeps nothing: its memory is the host's.
        """
        asked = self.config.device_budget_gib
        if self.device.kind != "cuda":
            return 0 if asked == "auto" else int(asked * report.GIB)
        free, _ = torch.cuda.mem_get_info()
        ours = free + torch.cuda.memory_reserved()  # what other processes hold is theirs
        budget = ours * DEVICE_SHARE if asked == "auto" else min(asked * report.GIB, ours)
        return max(0, int(budget - torch.cuda.max_memory_reserved()))

    def _peak_bytes(self) -> int | None:
        """Largest allocation total of the device so far, None where the device does not count."""
        return torch.cuda.max_memory_allocated() if self.device.kind == "cuda" else None

    def _time_step(self) -> None:
        now = time.perf_counter()
        if self._last_step is not None:
            self._step_seconds = [*self._step_seconds[-RECENT_STEPS + 1 :], now - self._last_step]
        self._last_step = now

    def _swapped_fraction(self) -> float | None:
        if self.config.tokenwise.alpha != "auto":
            return float(self.config.tokenwise.alpha)
        return statistics.fmean(region.rows for region in self.regions) if self.solution and self.regions else None

    def _summary(self) -> str:
        solution = self.solution
        swapped = sum(region.swapped_bytes for region in solution.regions.values())
        recompute_s = sum(region.recompute_s for region in solution.regions.values())
        return (
            f"planned: {swapped / report.GIB:.3f} GiB of outputs swapped and "
            f"{solution.device_bytes / report.GIB:.3f} GiB kept a step, {recompute_s:.3f} s recomputed, "
            f"{solution.host_bytes / report.GIB:.3f} GiB of host memory, bound by {solution.bound}"
        )

    def _log(self, text: str) -> None:
        if not dist.is_initialized() or dist.get_rank() == 0:
            log.info("memplug: %s: %s", self.stage.value, text)


def initial_regions(config: MemplugConfig, named_kinds: Sequence[tuple[str, str]]) -> list[Region]:
    """Regions at the policy they start with: the block's alpha, or the safest setting until there is a plan.

    Args:
        named_kinds: (qualified name, class name) of each module.
    """
    alpha = config.tokenwise.alpha
    return [Region(name, kind, rows=0.0 if alpha == "auto" else float(alpha)) for name, kind in named_kinds]


def _gather(value: Any) -> list[Any]:
    """What every rank passed, in rank order."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
