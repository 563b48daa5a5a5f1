"""One device: CUDA, or the CPU, where everything is in program order already.

Copies order memory across streams by events alone (native/copies.h). The tests add a third implementation, whose copies
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
    """The CPU: copies happen at once, in program order. Subclasses override all of it."""

    kind = "cpu"
    torch_device = torch.device("cpu")
    memory: DeviceMemory | None = None  # what its allocator counts; None: it counts nothing
    host_time: HostTime | None = None  # of the host's clock, where that is the device's own; None: it can be measured
    runs_behind = False  # the host queues operators, and waits only where the device is the faster

    def streams(self, core: Any) -> Any:
        """Streams, events and copies for transfers (native/streams.h)."""
        return core.cpu_streams()

    def is_capturing(self) -> bool:
        """Whether operators are captured into a graph now, instead of run."""
        return False

    def link_rates(self) -> tuple[float, float]:
        """Device to host and host to device with both at work, in bytes per second."""
        return link_rates(self.torch_device)

    def host_available_bytes(self) -> int:
        """Memory of its host that processes can still have."""
        return host_available_bytes()

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """1-D uint8: whole pages of the system, not of torch's allocator, whose memory is the device's where the CPU
        trains.

        Raises:
            MemoryError: the system has less.
        """
        memory = np.empty(nbytes + PAGE_BYTES, np.uint8)
        begin = -memory.ctypes.data % PAGE_BYTES
        return torch.from_numpy(memory[begin : begin + nbytes])

    def pin(self, buffer: torch.Tensor) -> bool:
        """Register host memory (1-D uint8) with the driver; False where the driver refuses."""
        return True

    def unpin(self, buffer: torch.Tensor) -> None:
        """Undo `pin`."""

    def get_rng_state(self) -> torch.Tensor:
        """State of the device's default random generator."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Put back what `get_rng_state` returned."""
        torch.set_rng_state(state)

    def now_s(self) -> float:
        """The host's clock, in seconds."""
        return time.perf_counter()

    def stamp(self) -> Any:
        """A point in time of the compute stream."""
        return time.perf_counter()

    def seconds_between(self, begin: Any, end: Any) -> float:
        """Time between two stamps, in seconds. The stream must have passed both (`synchronize`)."""
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
        return core.cuda_streams(self.torch_device.index)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def pin(self, buffer: torch.Tensor) -> bool:
        code = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)
        if int(code) == 0:
            return True
        # CUDA keeps the refusal as its last error, and the next kernel launch, whosever it is, would raise it
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.torch_device)
        return False

    def unpin(self, buffer: torch.Tensor) -> None:
        torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())

    def get_rng_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state(self.torch_device)

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state, self.torch_device)

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def seconds_between(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end) / 1e3

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)


def _cuda(device: torch.device) -> Device:
    return CudaDevice(torch.cuda.current_device() if device.index is None else device.index)


KINDS: dict[str, Callable[[torch.device], Device]] = {"cpu": lambda _: Device(), "cuda": _cuda}
"""The implementations by type of a torch device; others add theirs."""


def device_of(tensor_device: torch.device) -> Device:
    """The implementation for a torch device ("cuda:0", "cpu").

    Raises:
        ValueError: for a device type that memplug has no implementation for.
    """
    if tensor_device.type not in KINDS:
        raise ValueError(f"memplug runs on cuda and cpu devices, not on {tensor_device.type}")
    return KINDS[tensor_device.type](tensor_device)
