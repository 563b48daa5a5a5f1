"""A GPU that is not there: kernels and copies take the time that its rates say, and memory is addresses.

    device = VirtualDevice(Hardware.named("h200"))
    with torch.device("virtual"):
        model = make_model()
    began_s = device.synchronize()
    model(torch.empty(1, 131072, 4096, device="virtual")).sum().backward()
    print(device.synchronize() - began_s, "s", device.usage().allocated_peak, "bytes")

It is a device of torch's, "virtual": programs, autograd and memplug run on it as on any other, with streams and events,
with torch's caching allocator of CUDA simulated (memplug/predict/virtual/native/memory.h), and with torch's own
`OutOfMemoryError` where its memory is used up. What shapes an operator's outputs have, torch's meta kernels say; one
whose output depends on data fails there, but for `nonzero` and `masked_select`: see `assume_true`. A number that is
read, such as `loss.item()`, is 1. `answer_by` has other answers.
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
from memplug.predict.virtual.hardware import Hardware, Rate
from memplug.torch_private import PRIVATE_DEVICE_TYPE, get_private_device_name, register_device_module

NAME = "virtual"
_UNBOUNDED = 2**63 - 1  # bytes
LINK_RATES_BYTES = 64 << 20
"""Of the copies that memplug measures a link with."""
__all__ = ["Hardware", "Rate", "VirtualDevice"]


class VirtualDevice(Device):
    """The one of this process: another one takes its place, with other rates, and what was made goes on living.

    Args:
        hardware: how fast it is, and how much memory it has.
        expandable_segments: as of `PYTORCH_CUDA_ALLOC_CONF`.
        attention: the back end of it, such as "flash"; None: the profile's first one.
        bounded: requests fail where its memory is used up; else they are served, and `usage` tells how much it would
            have had to be. Plans keep to its memory in any case.
        host_bytes: memory of the host that it has beside it; None: that of this machine.

    Raises:
        HardwareError: the profile has no such attention. Torch has another device in its place already, of another
            vendor's; or the process has run a backward before: autograd has no thread for devices that come later.
        NativeError: it cannot be built.
    """

    kind = NAME
    runs_behind = True
    _current: VirtualDevice | None = None

    def __init__(
        self,
        hardware: Hardware,
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
        """The one that was made last."""
        assert cls._current is not None, "tensors are on it"
        return cls._current

    @staticmethod
    def default_stream() -> torch.Stream:
        """The one that is current where no other is."""
        kind = PRIVATE_DEVICE_TYPE.value
        return torch.Stream(stream_id=0, device_index=0, device_type=kind)

    def streams(self, core: Any) -> Any:
        own = self.hardware
        return core.other_streams(self._core.spend, own.observe_s, own.region_s, own.restore_s)

    def link_rates(self) -> tuple[float, float]:
        both = self.hardware.to_host_both_bytes_per_s, self.hardware.to_device_both_bytes_per_s
        return both[0].at(LINK_RATES_BYTES), both[1].at(LINK_RATES_BYTES)

    def host_available_bytes(self) -> int:
        return super().host_available_bytes() if self.host_bytes is None else int(self.host_bytes)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """As much as is asked for: nothing is ever written to it."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def now_s(self) -> float:
        return self._core.host_s()

    def stamp(self) -> torch.Event:
        event = torch.Event(NAME, enable_timing=True)
        event.record()
        return event

    def seconds_between(self, begin: torch.Event, end: torch.Event) -> float:
        return begin.elapsed_time(end) / 1e3

    def synchronize(self) -> float:
        """The host waits for all that is queued: seconds that have gone by on it since the device last began."""
        return self._core.synchronize()

    def usage(self) -> Any:
        """Bytes `requested`, `allocated` (rounded) and `reserved` now, `..._peak` of each, and `retries`: requests for
        which the allocator gave segments back; `holes`: free bytes that cannot go back now. An arena counts as one
        request.
        """
        return self._core.memory()

    def reset_peaks(self) -> None:
        """Peaks count from here on."""
        self._core.reset_peaks()

    def empty_cache(self) -> None:
        """Segments that are free go back to the device."""
        self._core.empty_cache()

    def restart(self) -> None:
        """Makes the device forget what it ran: its clock is at zero, nothing is counted, segments that are free go
        back, and where no tensor is alive, later ones have the addresses that the first ones had.
        """
        self._core.settle()
        if self.usage().allocated:  # by cycles, at most
            gc.collect()
        self._core.restart()

    def flops(self) -> float:
        """Floating-point operations of all matrix products, convolutions and attention so far."""
        return self._core.flops()

    def assume_true(self, share: float) -> None:
        """Of each mask that elements are chosen by, so many are true from here on: at first 1, all of them. With
        tokens spread evenly over experts, it is the share of the experts that a token goes to.
        """
        self._core.assume_true(share)

    def answer_by(self, answers: Callable[[Any, bool], list[torch.Tensor] | None] | None) -> None:
        """What is asked for the results of an operator that depends on values, where it runs: of its `name` and
        `inputs`, and whether the program waits for them. It gives tensors of the host, or on torch's meta device those
        of which the sizes count; None: they are made up, as without it.
        """
        self._core.answer_by(answers)

    def keep_spans(self, on: bool) -> None:
        """What keeps streams busy is noted from here on, or no more."""
        self._core.keep_spans(on)

    def take_spans(self) -> list[Any]:
        """What was noted, in the order in which it was queued: `stream`, `begin_s`, `end_s`, when the host queued it,
        `queued_s`, and `name`.
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
    """`torch.virtual`: what torch asks the module of a device for."""

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
        """Nothing is drawn."""

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        """Nothing is drawn."""

    @staticmethod
    def memory_stats(device: Any = None) -> dict[str, int]:
        """As of `torch.cuda.memory_stats`, what memplug asks for."""
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
        raise HardwareError(f"torch has a device {get_private_device_name()!r} in the virtual one's place")
    core = native.load()
    try:
        core.start()
    except RuntimeError as error:
        raise HardwareError(str(error)) from error
    torch.utils.rename_privateuse1_backend(NAME)
    if not hasattr(torch, NAME):  # it was tried before, too late
        register_device_module(NAME, _Module)
    try:
        torch.ones(1, device=NAME, requires_grad=True).backward()
    except RuntimeError as error:
        raise HardwareError(
            "the virtual device has to be made before the first backward of the process",
            "Make the estimate before anything is trained, or in a process of its own.",
        ) from error
    atexit.register(_settle, core, os.getpid())
    return core


def _settle(core: Any, process: int) -> None:
    """As the process ends, or autograd's thread may ask for the lock of a Python that is gone; a fork has no such
    thread.
    """
    if os.getpid() == process:
        core.settle()
