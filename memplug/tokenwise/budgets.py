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

HOST_SHARE = 0.8  # share of the memory that is available now, divided among the processes of this machine
# number of this machine's processes, as torchrun, DeepSpeed's launcher, Open MPI, MVAPICH and Slurm set it
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
        has_buffers: rounding buffers take memory beside a step, because no addresses are planned for prefetched
            tensors.
    """

    device: Device
    asked_gib: float | Literal["auto"] = "auto"
    has_buffers: bool = False

    @property
    def nbytes(self) -> int | None:
        """Return the most bytes that a plan's step may use on the device.

        None on the CPU if the block has no budget.
        """
        return capacity.device_bytes(self.asked_gib, self.device)

    def room_bytes(self, observed_peak_bytes: int | None, beside_bytes: int = 0) -> int:
        """Return the bytes that a plan may keep on the device.

        They are the budget less the bytes that a step at the safest setting needs.

        If the peak of that step is unknown, the peak of the whole run counts. It includes the kept outputs of earlier
        plans, so a second plan keeps less than it could. On the CPU "auto" keeps nothing, since its memory is the
        host's, and only the recorder knows the needs of a step: without it the whole budget is for kept outputs.

        Args:
            observed_peak_bytes: largest allocation total in the step at the safest setting; None: unknown.
            beside_bytes: bytes that are reserved in such a step and belong to no tensor.
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
            host_bytes: limit of the pool.
            room_bytes: see the method `room_bytes`.
            buffers: number of the executor's buffers.
            in_flight: see `Budget`; None: unknown, and tensors of all buffers count as in flight at the peak.
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
        """Check the budget on all ranks, which all call this together.

        Args:
            observed_peak_bytes: largest allocation total in the step at the safest setting; None: unknown, and not
                checked.
            gather: returns the arguments of all ranks, in rank order.
            members: numbers of these ranks in the world, in the same order.

        Raises:
            BudgetError: on all ranks, if one has to take more of the device than its block grants; it names the rank
                that takes the most.
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
        """Return whether there is room for rounding buffers.

        A step with them has to keep to the budget. And the device has to have room for them on top of the most that the
        run has reserved so far, within `DEVICE_SHARE` of the memory that other processes leave. That most includes
        tensors that were prefetched without rounding buffers: no buffers are better than a step that runs out of
        memory.

        Args:
            buffer_bytes: size of all buffers together.
            more_bytes: the part of it that earlier buffers did not take.
            step_bytes: predicted bytes of a step without buffers; None: unknown.
        """
        if self.nbytes is not None and step_bytes is not None and step_bytes + buffer_bytes > self.nbytes:
            return False
        if self.device.memory is None:
            return True
        return self.device.memory.reserved_peak_bytes + more_bytes <= self.device.memory.own_bytes * DEVICE_SHARE


def allocation_retries(device: Device) -> int:
    """Return how often the device's allocator had to empty its cache before an allocation fitted.

    0 where the device does not count.
    """
    return 0 if device.memory is None else device.memory.retries


def peak_bytes(device: Device) -> int | None:
    """Return the largest allocation total of the device so far, in bytes; None where the device does not count."""
    return None if device.memory is None else device.memory.allocated_peak_bytes
