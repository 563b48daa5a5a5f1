"""What a plan may use: host memory, device memory, and the rates of the link between them."""

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

HOST_SHARE = 0.8  # of the memory that is available now, shared by the processes of this machine
# processes of this machine, as torchrun, DeepSpeed's launcher, Open MPI, MVAPICH and Slurm tell them
LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
)


def host_budget_bytes(config: MemplugConfig, device: Device) -> int:
    """Bound of the pinned pool of a process with that device."""
    if config.host_budget_gib != "auto":
        return int(min(config.host_budget_gib * GIB, UNLIMITED_BYTES))
    processes = next((os.environ[name] for name in LOCAL_SIZES if os.environ.get(name, "").isdigit()), "1")
    return int(device.host_available_bytes() * HOST_SHARE / int(processes))


@dataclass(frozen=True)
class DeviceBudget:
    """What the steps of a plan may have of the device.

    Attributes:
        device: that trains.
        asked_gib: "device_budget_gib".
        has_buffers: rounding buffers come on top of a step, as nothing has planned addresses for them.
    """

    device: Device
    asked_gib: float | Literal["auto"] = "auto"
    has_buffers: bool = False

    @property
    def nbytes(self) -> int | None:
        """The most that a plan's step may have in use on the device; None: nothing was asked for on the CPU."""
        return capacity.device_bytes(self.asked_gib, self.device)

    def room_bytes(self, observed_peak_bytes: int | None, beside_bytes: int = 0) -> int:
        """Returns what a plan may keep on the device: the budget less what the step at the safest setting needs.

        Where the peak of that very step is unknown, that of the whole run counts, which an earlier plan's kept outputs
        are part of: a second plan then keeps less than it could. On the CPU "auto" keeps nothing, its memory is the
        host's, and what a step needs is known to the recorder alone: without it the budget is for kept outputs.

        Args:
            observed_peak_bytes: largest allocation total in the step at the safest setting; None: unknown.
            beside_bytes: that are reserved in such a step, and that no tensor has.
        """
        needed_bytes = (observed_peak_bytes or 0) + beside_bytes
        if self.device.memory is not None and observed_peak_bytes is None:
            needed_bytes = self.device.memory.reserved_peak_bytes
        return max(0, (self.nbytes or 0) - needed_bytes)

    def of_plan(
        self, host_bytes: int, room_bytes: int, buffers: int, in_flight: tuple[plan.InFlight, ...] | None = None
    ) -> plan.Budget:
        """Returns what the planner may use; the first plan of a process measures the link.

        Args:
            host_bytes: of the pool.
            room_bytes: see `room_bytes`.
            buffers: of the executor.
            in_flight: see `Budget`; None: unknown, and it counts as if it were there at the peak.
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
        """Raises on all ranks alike, which all call it, where one of them has to take more than its block grants.

        Args:
            observed_peak_bytes: largest allocation total in the step at the safest setting; None: unknown, and not
                checked.
            gather: returns what every rank passed, in rank order.
            members: ranks of the world, in that order.

        Raises:
            BudgetError: of the one that takes the most.
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
        """Returns whether a step with rounding buffers keeps to the budget, and the device has room for what they take
        on top of what the run has needed so far, all within `DEVICE_SHARE` of what other processes leave. Tensors that
        were prefetched without rounding buffers count as well: rather none than a step that runs out of memory.

        Args:
            buffer_bytes: of all buffers.
            more_bytes: of these, what no earlier ones took.
            step_bytes: that a step takes without them, as predicted; None: unknown.
        """
        if self.nbytes is not None and step_bytes is not None and step_bytes + buffer_bytes > self.nbytes:
            return False
        if self.device.memory is None:
            return True
        return self.device.memory.reserved_peak_bytes + more_bytes <= self.device.memory.own_bytes * DEVICE_SHARE


def allocation_retries(device: Device) -> int:
    """How often the device's allocator has had to empty its cache before an allocation fitted; 0 where it does not
    count.
    """
    return 0 if device.memory is None else device.memory.retries


def peak_bytes(device: Device) -> int | None:
    """Largest allocation total of the device so far, None where the device does not count."""
    return None if device.memory is None else device.memory.allocated_peak_bytes
