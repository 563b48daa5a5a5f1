"""The budgets of a plan: host memory, device memory, and the rates of the link between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from memplug.config import MemplugConfig
from memplug.device import capacity
from memplug.device.capacity import DEVICE_SHARE
from memplug.device.device import Device
from memplug.errors import BudgetError
from memplug.sizes import GIB, HOST_ROW_BYTES, UNLIMITED_BYTES
from memplug.tokenwise.plan import solver as plan

HOST_SHARE = 0.8  # share of the available host memory that all processes of this machine may pin together
# environment variables with the number of processes on this machine: of torchrun, DeepSpeed's launcher, Open MPI,
# MVAPICH and Slurm
LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
)


def host_budget_bytes(config: MemplugConfig, device: Device) -> int:
    """Return the limit of one process's pool of pinned host memory, in bytes."""
    if config.host_budget_gib != "auto":
        return int(min(config.host_budget_gib * GIB, UNLIMITED_BYTES))
    processes = next((os.environ[name] for name in LOCAL_SIZES if os.environ.get(name, "").isdigit()), "1")
    return int(device.host_available_bytes() * HOST_SHARE / int(processes))


@dataclass(frozen=True)
class DeviceBudget:
    """The device memory that steps under a plan may use.

    Attributes:
        device: the device that trains.
        asked_gib: the block's "device_budget_gib".
        has_buffers: whether rounding buffers take memory in addition to a step's tensors. They do unless the arena
            plans addresses for prefetched tensors.
    """

    device: Device
    asked_gib: float | Literal["auto"] = "auto"
    has_buffers: bool = False

    @property
    def nbytes(self) -> int | None:
        """Return the limit of the device bytes that a step under a plan uses; None: no limit.

        There is no limit on the CPU if "device_budget_gib" is "auto".
        """
        return capacity.device_bytes(self.asked_gib, self.device)

    def room_bytes(self, observed_peak_bytes: int | None, beside_bytes: int = 0) -> int:
        """Return the bytes that a plan may keep on the device.

        This is the budget less the bytes that a step at the safest setting needs. If the peak of that step is unknown,
        the reserved peak of the whole run counts instead. That peak includes outputs kept under earlier plans, so later
        plans keep less than they could.

        On the CPU, device memory is host memory: if "device_budget_gib" is "auto", a plan keeps nothing. If the
        budget is a number and the peak is unknown, a plan may keep the whole budget.

        Args:
            observed_peak_bytes: peak of the allocated bytes in the step at the safest setting; None: unknown.
            beside_bytes: bytes that the device's allocator reserves in that step in addition to its tensors.
        """
        needed_bytes = (observed_peak_bytes or 0) + beside_bytes
        if self.device.memory is not None and observed_peak_bytes is None:
            needed_bytes = self.device.memory.reserved_peak_bytes
        return max(0, (self.nbytes or 0) - needed_bytes)

    def of_plan(
        self, host_bytes: int, room_bytes: int, buffers: int, in_flight: tuple[plan.InFlight, ...] | None = None
    ) -> plan.Budget:
        """Return the planner's budget; the first call in a process measures the link.

        Args:
            host_bytes: limit of the pinned pool.
            room_bytes: see the method `room_bytes`.
            buffers: see `Executor`.
            in_flight: see `Budget`; None: unknown. Then the plan assumes that the tensors of `buffers` regions are in
                flight at the peak.
        """
        d2h, h2d = self.device.link_rates()
        is_limited = self.nbytes is not None
        return plan.Budget(
            d2h_bytes_per_s=d2h,
            h2d_bytes_per_s=h2d,
            host_bytes=host_bytes,
            padding_bytes=HOST_ROW_BYTES - 1,
            device_bytes=room_bytes,
            in_flight=(in_flight or (plan.InFlight(buffers),)) if is_limited else (),
            buffers=buffers if is_limited and self.has_buffers else 0,
        )

    def require(
        self, observed_peak_bytes: int | None, gather: Callable[[Any], list[Any]], members: Sequence[int]
    ) -> None:
        """Check the budget on all ranks; all ranks call this together.

        Args:
            observed_peak_bytes: peak of the allocated bytes in the step at the safest setting; None: unknown, so this
                rank is not checked.
            gather: collective that returns the arguments of all ranks, in rank order.
            members: world rank of each rank that calls `gather`, in the order of `gather`'s results.

        Raises:
            BudgetError: on all ranks, if the step at the safest setting exceeds "device_budget_gib" on any rank. The
                error names the rank with the largest peak among those that exceed it.
        """
        everyone = gather((observed_peak_bytes or 0, self.asked_gib))
        short = [
            (peak_bytes / GIB, rank, asked_gib)
            for rank, (peak_bytes, asked_gib) in zip(members, everyone, strict=True)
            if asked_gib != "auto" and peak_bytes > asked_gib * GIB
        ]
        if short:
            raise BudgetError(*max(short))

    def holds_buffers(self, buffer_bytes: int, more_bytes: int, step_bytes: int | None) -> bool:
        """Return whether the device has room for rounding buffers.

        A step with the buffers has to stay within the budget. The run's reserved peak and the buffers together have to
        stay within `DEVICE_SHARE` of the memory that other processes leave. The reserved peak includes tensors that
        were prefetched without buffers, so the answer may be False although the buffers would fit: training without
        buffers is better than running out of memory.

        Args:
            buffer_bytes: size of all buffers together.
            more_bytes: growth over the largest earlier buffers, which the reserved peak already includes.
            step_bytes: predicted bytes of a step without buffers; None: unknown.
        """
        if self.nbytes is not None and step_bytes is not None and step_bytes + buffer_bytes > self.nbytes:
            return False
        if self.device.memory is None:
            return True
        return self.device.memory.reserved_peak_bytes + more_bytes <= self.device.memory.own_bytes * DEVICE_SHARE


def allocation_retries(device: Device) -> int:
    """Return how often the device's allocator had to empty its cache and retry; 0 if the device does not count this."""
    return 0 if device.memory is None else device.memory.retries


def peak_bytes(device: Device) -> int | None:
    """Return the peak of the bytes allocated on the device so far; None if the device does not count them."""
    return None if device.memory is None else device.memory.allocated_peak_bytes
