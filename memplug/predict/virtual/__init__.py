"""A virtual GPU: kernels and copies take the time that a GPU's profile predicts, and memory is only addresses.

    device = VirtualDevice(GpuProfile.named("h200"))
    with torch.device("virtual"):
        model = make_model()
    began_s = device.synchronize()
    model(torch.empty(1, 131072, 4096, device="virtual")).sum().backward()
    print(device.synchronize() - began_s, "s", device.usage().allocated_peak, "bytes")

The virtual GPU is a torch device named "virtual". Programs, autograd and memplug run on it as on any other device. It
has streams and events, simulates torch's CUDA caching allocator (native/memory.h), and raises torch's own
`OutOfMemoryError` if its memory is used up.

torch's meta kernels determine the sizes of an operator's outputs. `nonzero` and `masked_select` assume how many
elements are true (`assume_true`); any other operator whose meta kernel needs values fails. A number that the program
reads, such as `loss.item()`, is 1. A callback can supply all these results instead (`answer_by`).
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
from collections.abc import Callable
from typing import Any

import torch

from memplug.device.device import KINDS, Device
from memplug.device.host_time import HostTime
from memplug.device.memory import DeviceMemory
from memplug.errors import HardwareError
from memplug.predict.virtual import costs, native
from memplug.predict.virtual.hardware import GpuProfile, Rate
from memplug.torch_private import PRIVATE_DEVICE_TYPE, get_private_device_name, register_device_module

NAME = "virtual"
_UNBOUNDED = 2**63 - 1  # bytes
LINK_RATES_BYTES = 64 << 20
"""Size of a copy for which `link_rates` gives the profile's rates; memplug measures real links with such copies."""
__all__ = ["GpuProfile", "Rate", "VirtualDevice"]


class VirtualDevice(Device):
    """The virtual device of this process; a new instance replaces the settings of earlier ones.

    Tensors that exist already stay valid.

    Args:
        hardware: The profile with the GPU's rates and memory.
        expandable_segments: Whether the allocator uses expandable segments, as with `PYTORCH_CUDA_ALLOC_CONF`.
        attention: The attention back end, such as "flash"; None: the profile's first one.
        bounded: Whether requests fail if the device's memory is used up. Otherwise all requests are served, and `usage`
            reports how much memory they took. In both cases plans keep to the profile's memory.
        host_bytes: Host memory next to the device; None: this machine's.

    Raises:
        HardwareError: The profile has no such attention back end; another vendor's device has the virtual device's slot
            in torch; or the process has already run a backward (autograd starts threads only for devices that exist at
            the first backward).
        NativeError: The native code cannot be built.
    """

    kind = NAME
    runs_behind = True
    _current: VirtualDevice | None = None

    def __init__(
        self,
        hardware: GpuProfile,
        *,
        expandable_segments: bool = False,
        attention: str | None = None,
        bounded: bool = True,
        host_bytes: float | None = None,
    ):
        self._core = _started()
        self.hardware, self.host_bytes, self.torch_device = hardware, host_bytes, torch.device(NAME, 0)
        self.memory = _Memory(self._core, int(hardware.memory_bytes))
        self.host_time = HostTime(
            hardware.launch_s, hardware.observe_s, time_s=0.0, region_s=hardware.region_s, restore_s=hardware.restore_s
        )
        backend = hardware.attention(attention)
        cost = functools.partial(costs.cost, hardware, backend)
        self._core.set_costs(cost, functools.partial(costs.copy_s, hardware), hardware.launch_s)
        self._core.attend_by(backend)
        self._core.limit_memory(int(hardware.memory_bytes) if bounded else _UNBOUNDED)
        self._core.expand_segments(expandable_segments)
        VirtualDevice._current = self

    @classmethod
    def current(cls) -> VirtualDevice:
        """Return the last instance; there must be one."""
        assert cls._current is not None, "a VirtualDevice was made"
        return cls._current

    @staticmethod
    def default_stream() -> torch.Stream:
        """Return the device's default stream."""
        kind = PRIVATE_DEVICE_TYPE.value
        return torch.Stream(stream_id=0, device_index=0, device_type=kind)

    def streams(self, core: Any) -> Any:
        """Return the native object through which memplug's core uses streams, events and copies of this device.

        The object advances the host's clock by the times that the profile has for memplug's own work.
        """
        own = self.hardware
        return core.other_streams(self._core.spend, own.observe_s, own.region_s, own.restore_s)

    def link_rates(self) -> tuple[float, float]:
        """Return the link's rates with both directions busy.

        Returns:
            Device to host and host to device, in bytes per second.
        """
        both = self.hardware.to_host_both_bytes_per_s, self.hardware.to_device_both_bytes_per_s
        return both[0].at(LINK_RATES_BYTES), both[1].at(LINK_RATES_BYTES)

    def host_available_bytes(self) -> int:
        """Return the host memory that processes can still allocate, in bytes."""
        return super().host_available_bytes() if self.host_bytes is None else int(self.host_bytes)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Return pinned host memory of any size; nothing writes to it, so it takes no physical memory.

        Args:
            nbytes: The size.

        Returns:
            uint8[nbytes].
        """
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def now_s(self) -> float:
        """Return the time on the host's simulated clock, in seconds."""
        return self._core.host_s()

    def stamp(self) -> torch.Event:
        """Record an event on the current stream and return it."""
        event = torch.Event(NAME, enable_timing=True)
        event.record()
        return event

    def seconds_between(self, begin: torch.Event, end: torch.Event) -> float:
        """Return the simulated time between two events, in seconds."""
        return begin.elapsed_time(end) / 1e3

    def synchronize(self) -> float:
        """Let the host wait for all queued work.

        Returns:
            The time on the host's clock, in seconds since the device was started or restarted.
        """
        return self._core.synchronize()

    def usage(self) -> Any:
        """Return the allocator's counters, as an object with these attributes.

        * `requested`, `allocated` (requests rounded up) and `reserved`: current bytes.
        * `requested_peak`, `allocated_peak` and `reserved_peak`: their peaks since `reset_peaks`.
        * `retries`: the number of requests for which the allocator released segments.
        * `holes`: the free bytes that the allocator cannot release now.

        An arena counts as one request.
        """
        return self._core.memory()

    def reset_peaks(self) -> None:
        """Set the peaks to the current usage."""
        self._core.reset_peaks()

    def empty_cache(self) -> None:
        """Release free segments to the device."""
        self._core.empty_cache()

    def restart(self) -> None:
        """Set the clocks and counters to zero, and release free segments.

        If no tensor is alive, addresses begin anew too: the next tensors get the addresses of the process's first ones.
        """
        self._core.settle()
        if self.usage().allocated:  # reference cycles may keep tensors alive
            gc.collect()
        self._core.restart()

    def flops(self) -> float:
        """Return the floating-point operations of matmuls, convolutions and attention since the last restart."""
        return self._core.flops()

    def assume_true(self, share: float) -> None:
        """Set the fraction of a mask's elements that operators such as `nonzero` treat as true; 1 by default.

        For tokens spread evenly over experts, pass the fraction of experts that each token goes to.

        Args:
            share: The fraction, from 0 to 1.
        """
        self._core.assume_true(share)

    def answer_by(self, answers: Callable[[Any, bool], list[torch.Tensor] | None] | None) -> None:
        """Set the callback that supplies the results of operators whose results depend on values.

        Args:
            answers: The callback; None removes it. Called with the operator (`name` and `inputs`), and with whether the
                program waits for the result. Returns the result's tensors: on the CPU, or on the meta device if only
                their sizes matter. If it returns None, the device acts as without a callback: the device makes the
                result up, or the operator fails.
        """
        self._core.answer_by(answers)

    def keep_spans(self, on: bool) -> None:
        """Start or stop recording the spans in which streams are busy.

        Args:
            on: True starts, False stops.
        """
        self._core.keep_spans(on)

    def take_spans(self) -> list[Any]:
        """Return the recorded spans in the order in which the host queued them, and forget them.

        Returns:
            Spans with `stream`, `begin_s`, `end_s`, `queued_s` (when the host queued the work) and `name`.
        """
        return self._core.take_spans()


class _Memory(DeviceMemory):
    def __init__(self, core: Any, own_bytes: int):
        super().__init__()
        self._core, self._own_bytes = core, own_bytes

    @property
    def own_bytes(self) -> int:
        return self._own_bytes

    @property
    def reserved_bytes(self) -> int:
        return self._core.memory().reserved

    @property
    def holes_bytes(self) -> int:
        return self._core.memory().holes

    @property
    def retries(self) -> int:
        return self._core.memory().retries

    def _peaks(self) -> tuple[int, int]:
        memory = self._core.memory()
        return memory.allocated_peak, memory.reserved_peak


class _Module:
    """The module `torch.virtual`, with the functions that torch calls on a device's module."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        return VirtualDevice.current().hardware.name

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """Do nothing: the device draws no random numbers."""

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        """Do nothing: the device draws no random numbers."""

    @staticmethod
    def memory_stats(device: Any = None) -> dict[str, int]:
        """Return the one entry of `torch.cuda.memory_stats` that memplug reads."""
        return {"requested_bytes.all.current": native.load().memory().requested}

    @staticmethod
    def empty_cache() -> None:
        native.load().empty_cache()

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


KINDS[NAME] = lambda _: VirtualDevice.current()


@functools.cache
def _started() -> Any:
    if get_private_device_name() not in ("privateuseone", NAME):
        raise HardwareError(
            f"the virtual device's slot in torch (PrivateUse1) is taken by {get_private_device_name()!r}"
        )
    core = native.load()
    try:
        core.start()
    except RuntimeError as error:
        raise HardwareError(str(error)) from error
    torch.utils.rename_privateuse1_backend(NAME)
    if not hasattr(torch, NAME):  # an earlier attempt may have registered it and then failed
        register_device_module(NAME, _Module)
    try:
        torch.ones(1, device=NAME, requires_grad=True).backward()
    except RuntimeError as error:
        raise HardwareError(
            "the virtual device has to be made before the first backward of the process",
            "Run the estimate before any training, or in a separate process.",
        ) from error
    atexit.register(_settle, core, os.getpid())
    return core


def _settle(core: Any, process: int) -> None:
    """Wait for autograd's thread before the process ends.

    Otherwise the thread may wait for Python's lock after Python has shut down.

    Args:
        core: The native module.
        process: The id of the process that started the device; a forked process has no such thread and does not wait.
    """
    if os.getpid() == process:
        core.settle()
