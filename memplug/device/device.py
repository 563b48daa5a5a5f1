"""One device: CUDA, or the CPU, where everything happens in program order.

Only events order the copies of different streams (native/copies.h). The tests add a third implementation, whose copies
run as late or as early as events allow.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from memplug.device.hardware import host_available_bytes, link_rates
from memplug.device.host_time import HostTime
from memplug.device.memory import CudaMemory, DeviceMemory

PAGE_BYTES = 4096


class Device:
    """The CPU, where copies happen at once, in program order. Subclasses are other devices."""

    kind = "cpu"
    torch_device = torch.device("cpu")
    memory: DeviceMemory | None = None  # counters of the device's allocator; None on the CPU
    host_time: HostTime | None = None  # memplug's own host time on a simulated clock; None: the clock is real
    runs_behind = False  # True: operators queue up on the device, which idles only if it is faster than the host

    def streams(self, core: Any) -> Any:
        """Return streams, events and copies for transfers (native/streams.h)."""
        return core.cpu_streams()

    def is_capturing(self) -> bool:
        """Return whether operators are being captured into a graph instead of run."""
        return False

    def link_rates(self) -> tuple[float, float]:
        """Return the copy rates (device to host, host to device) in bytes per second, while both directions run."""
        return link_rates(self.torch_device)

    def host_available_bytes(self) -> int:
        """Return the bytes of host memory that processes can still allocate."""
        return host_available_bytes()

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Return new host memory: whole pages from the system.

        The memory does not come from torch's allocator, which is the device's allocator if the CPU trains.

        Args:
            nbytes: size in bytes.

        Returns:
            uint8[nbytes].

        Raises:
            MemoryError: the system has less free memory.
        """
        memory = np.empty(nbytes + PAGE_BYTES, np.uint8)
        begin = -memory.ctypes.data % PAGE_BYTES
        return torch.from_numpy(memory[begin : begin + nbytes])

    def pin(self, buffer: torch.Tensor) -> bool:
        """Register host memory (uint8[n]) with the driver; return False if the driver refuses."""
        return True

    def unpin(self, buffer: torch.Tensor) -> None:
        """Unregister host memory that `pin` has registered."""

    def get_rng_state(self) -> torch.Tensor:
        """Return the state of the device's default random generator."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore a state that `get_rng_state` returned."""
        torch.set_rng_state(state)

    def now_s(self) -> float:
        """Return the time of the host's clock, in seconds."""
        return time.perf_counter()

    def stamp(self) -> Any:
        """Return a timestamp of the compute stream."""
        return time.perf_counter()

    def seconds_between(self, begin: Any, end: Any) -> float:
        """Return the time between two stamps, in seconds; the stream must have passed both (`synchronize`)."""
        return end - begin

    def synchronize(self) -> None:
        """Block the host until every stream is done."""


class CudaDevice(Device):
    """One CUDA device: its streams and generators, and the driver that registers host memory."""

    kind = "cuda"
    runs_behind = True

    def __init__(self, index: int):
        self.torch_device = torch.device("cuda", index)
        self.memory = CudaMemory(self.torch_device)

    def streams(self, core: Any) -> Any:
        """Return CUDA's streams, events and copies for transfers."""
        return core.cuda_streams(self.torch_device.index)

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured into a CUDA graph."""
        return torch.cuda.is_current_stream_capturing()

    def pin(self, buffer: torch.Tensor) -> bool:
        """Register host memory with CUDA; return False if CUDA refuses."""
        code = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)
        if int(code) == 0:
            return True
        # CUDA keeps the refusal as its last error, which the next kernel launch raises: launch one here
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.torch_device)
        return False

    def unpin(self, buffer: torch.Tensor) -> None:
        """Unregister host memory with CUDA."""
        torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())

    def get_rng_state(self) -> torch.Tensor:
        """Return the state of the device's default random generator."""
        return torch.cuda.get_rng_state(self.torch_device)

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore a state that `get_rng_state` returned."""
        torch.cuda.set_rng_state(state, self.torch_device)

    def stamp(self) -> torch.cuda.Event:
        """Return an event that is recorded on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def seconds_between(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the time between two events, in seconds."""
        return begin.elapsed_time(end) / 1e3

    def synchronize(self) -> None:
        """Block the host until every stream of the device is done."""
        torch.cuda.synchronize(self.torch_device)


def _cuda(device: torch.device) -> Device:
    return CudaDevice(torch.cuda.current_device() if device.index is None else device.index)


KINDS: dict[str, Callable[[torch.device], Device]] = {"cpu": lambda _: Device(), "cuda": _cuda}
"""Makes the `Device` for a torch device, by its type; other modules add types."""


def device_of(tensor_device: torch.device) -> Device:
    """Return the implementation for a torch device ("cuda:0", "cpu").

    Args:
        tensor_device: the torch device.

    Raises:
        ValueError: memplug has no implementation for this type of device.
    """
    if tensor_device.type not in KINDS:
        raise ValueError(f"memplug runs on cuda and cpu devices, not on {tensor_device.type}")
    return KINDS[tensor_device.type](tensor_device)
