"""The state around a region's forward that its recompute pass must meet again: autocast, random generators, attention
back ends, the default device. On a GPU it runs on autograd's own thread, which knows none of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from memplug.execute.core import core
from memplug.execute.device import Device


class Ambient:
    """Taken when a region's forward starts: by the native core (memplug/native/ambient.h), or here.

    Args:
        device: where the training runs.
        surroundings: states of the host that random operators depend on, each as a function that gives a context
            manager in which that state is back.
        cpu_rng, device_rng: generator states; of the device none where that is the CPU.
        autocast: (device, whether it is on, dtype) of each kind.
        attention: which back ends are enabled.
        default_device: of factory functions, where one was set.
    """

    def __init__(
        self,
        device: Device,
        surroundings: Sequence[Callable[[], Any]],
        cpu_rng: torch.Tensor,
        device_rng: torch.Tensor | None,
        autocast: Sequence[tuple[str, bool, torch.dtype]],
        attention: tuple[bool, ...],
        default_device: torch.device | None,
    ):
        self.device, self.surroundings = device, surroundings
        self.cpu_rng, self.device_rng = cpu_rng, device_rng
        self.autocast, self.attention, self.default_device = autocast, attention, default_device

    @classmethod
    def taken(cls, device: Device, surroundings: Sequence[Callable[[], Any]]) -> Ambient:
        """As it is now, without the native core."""
        kinds = ("cpu",) if device.kind == "cpu" else ("cpu", device.kind)
        return cls(
            device,
            surroundings,
            torch.get_rng_state(),
            None if device.kind == "cpu" else device.get_rng_state(),
            [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds],
            _attention_backends(),
            default_device(),
        )

    def during_forward(self) -> contextlib.AbstractContextManager[None]:
        """No autocast cache: a weight cast once for two regions would be cast again in the recompute pass of one. And
        nothing compiled.
        """
        casts = any(enabled for _, enabled, _ in self.autocast)
        return _without_autocast_cache() if casts else as_written()

    @contextlib.contextmanager
    def during_recompute(self) -> Iterator[None]:
        """The same state again, for a pass that runs the module."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(as_written())
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=False))
            if self.default_device is not None:
                stack.enter_context(self.default_device)
            now = _attention_backends()
            if now != self.attention:
                _set_attention_backends(self.attention)
                stack.callback(_set_attention_backends, now)
            stack.callback(torch.set_rng_state, torch.get_rng_state())
            torch.set_rng_state(self.cpu_rng)
            if self.device_rng is not None:
                stack.callback(self.device.set_rng_state, self.device.get_rng_state())
                self.device.set_rng_state(self.device_rng)
            for again in self.surroundings:
                stack.enter_context(again())
            yield


def as_written() -> contextlib.AbstractContextManager[Any]:
    """Nothing compiled runs inside: functions that the model compiles inside of a region run as they are written, since
    compiled code has no operators to see. Without the native core, of one thread at a time.
    """
    known = core()
    return torch.compiler.set_stance("force_eager") if known is None else known.AsWritten()


@contextlib.contextmanager
def _without_autocast_cache() -> Iterator[None]:
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with as_written():
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)


def default_device() -> torch.device | None:
    """Of factory functions, where one was set; `torch.get_default_device` would make a tensor to find out."""
    modes = reversed(_get_current_function_mode_stack())
    return next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)


def _attention_backends() -> tuple[bool, ...]:
    cuda = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )


def _set_attention_backends(enabled: tuple[bool, ...]) -> None:
    cuda = torch.backends.cuda
    for setter, value in zip(
        (cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_math_sdp, cuda.enable_cudnn_sdp),
        enabled,
        strict=True,
    ):
        setter(value)
