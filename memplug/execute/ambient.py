"""The state around a region's forward that its recompute pass must meet again: autocast, random generators, attention
back ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from memplug.execute.device import Device


class Ambient:
    """Taken when a region's forward starts."""

    def __init__(self, device: Device):
        self.device = device
        self.cpu_rng = torch.get_rng_state()
        self.device_rng = None if device.kind == "cpu" else device.get_rng_state()
        kinds = {"cpu", device.kind}
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in sorted(kinds)
        ]
        self.attention = _attention_backends()

    @contextlib.contextmanager
    def during_forward(self) -> Iterator[None]:
        """No autocast cache: a weight cast once for two regions would be cast again in the recompute pass of one."""
        if not any(enabled for _, enabled, _ in self.autocast):
            yield
            return
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(cached)

    @contextlib.contextmanager
    def during_recompute(self, random: bool) -> Iterator[None]:
        """The same state again; `random`: whether the forward drew random numbers."""
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=False))
            now = _attention_backends()
            if now != self.attention:
                _set_attention_backends(self.attention)
                stack.callback(_set_attention_backends, now)
            if random:
                stack.callback(torch.set_rng_state, torch.get_rng_state())
                torch.set_rng_state(self.cpu_rng)
                if self.device_rng is not None:
                    stack.callback(self.device.set_rng_state, self.device.get_rng_state())
                    self.device.set_rng_state(self.device_rng)
            yield


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
