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
    """Return the limit of a process's pinned pool, in bytes."""
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
        has_buffers: whether rounding buffers take memory beside a step's tensors: they do unless an arena plans
            addresses for prefetched tensors.
    """

    device: Device
    asked_gib: float | Literal["auto"] = "auto"
    has_buffers: bool = False

    @property
    def nbytes(self) -> int | None:
        """Return the most device bytes that a step under a plan may use.

        None, which means no limit, on the CPU if "device_budget_gib" is "auto".
        """
        return capacity.device_bytes(self.asked_gib, self.device)

    def room_bytes(self, observed_peak_bytes: int | None, beside_bytes: int = 0) -> int:
        """Return the bytes that a plan may keep on the device.

        This is the budget less the bytes that a step at the safest setting needs. If the peak of that step is unknown,
        the reserved peak of the whole run counts instead. The run's peak includes outputs kept under earlier plans, so
        a second plan then keeps less than it could.

        On the CPU, where device memory is host memory, a plan under "auto" keeps nothing. If the block sets a budget
        there but no recorder measures the step's peak, plans may keep the whole budget.

        Args:
            observed_peak_bytes: largest allocation total in the step at the safest setting; None: unknown.
            beside_bytes: bytes that the device's allocator reserves in that step beside its tensors.
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
            in_flight: see `Budget`; None: unknown. Then the tensors of `buffers` regions count as in flight at the
                peak.
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
            observed_peak_bytes: largest allocation total in the step at the safest setting; None: unknown, so this rank
                is not checked.
            gather: collective that returns the arguments of all ranks, in rank order.
            members: world ranks of the ranks that call `gather`, in the same order.

        Raises:
            BudgetError: on all ranks, if the step at the safest setting exceeds "device_budget_gib" on some rank. If it
                does so on several, the error names the one with the largest peak.
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
        stay within `DEVICE_SHARE` of the memory that other processes leave. That peak includes tensors that were
        prefetched without buffers, so the answer may be False although the buffers would fit: training without buffers
        is better than running out of memory.

        Args:
            buffer_bytes: size of all buffers together.
            more_bytes: bytes by which all buffers together exceed earlier ones, which the reserved peak includes.
            step_bytes: predicted bytes of a step without buffers; None: unknown.
        """
        if self.nbytes is not None and step_bytes is not None and step_bytes + buffer_bytes > self.nbytes:
            return False
        if self.device.memory is None:
            return True
        return self.device.memory.reserved_peak_bytes + more_bytes <= self.device.memory.own_bytes * DEVICE_SHARE


def allocation_retries(device: Device) -> int:
    """Return how often the device's allocator had to empty its cache before an allocation fitted.

    0 if the device does not count retries.
    """
    return 0 if device.memory is None else device.memory.retries


def peak_bytes(device: Device) -> int | None:
    """Return the largest allocation total of the device so far, in bytes; None if the device does not count."""
    return None if device.memory is None else device.memory.allocated_peak_bytes
