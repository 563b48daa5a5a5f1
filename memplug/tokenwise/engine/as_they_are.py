"""When regions run as they are: inside of what replays or transforms their operators; and when torch traces them."""

from __future__ import annotations

import logging

from memplug.device.device import Device
from memplug.errors import coded
from memplug.tokenwise.engine.ambient import is_transformed
from memplug.torch_private import (
    TRACING,
    get_dispatch_mode,
    is_fx_tracing,
    is_in_forward_ad,
    is_jit_tracing,
    len_torch_dispatch_stack,
    saved_tensors_hooks_is_enabled,
)

log = logging.getLogger("memplug")


class AsTheyAre:
    """Asked before each forward with gradients, of regions on one device; says each reason once."""

    def __init__(self, device: Device):
        self._device = device
        self._told: set[str] = set()

    def is_so(self) -> bool:
        """Whether a region's forward runs as without memplug now.

        Replays of a CUDA graph would write to host rows that are others' by then. Tensors of transforms and of
        forward-mode differentiation have no memory of their own to swap. Without saved-tensor hooks memplug does not
        learn what backward needs.
        """
        if self._device.is_capturing():
            return self._tell(
                "memplug: regions inside of a CUDA graph run as they are: nothing of them is swapped or recomputed. "
                "Capture without regions, or leave the graph out"
            )
        if is_transformed() or is_in_forward_ad():
            return self._tell(
                "memplug: regions inside of a function transform or of forward-mode differentiation run as they are: "
                "nothing of them is swapped or recomputed"
            )
        if not saved_tensors_hooks_is_enabled():
            return self._tell(
                "memplug: regions that run where saved-tensor hooks are disabled run as they are: nothing of them is "
                "swapped or recomputed"
            )
        return False

    def _tell(self, message: str) -> bool:
        """True, for whoever asked."""
        if message not in self._told:
            self._told.add(message)
            log.warning(coded("MP019", message))
        return True


def is_traced() -> bool:
    """Whether this forward is torch's, which makes a program of it, or of fake tensors: it trains nothing."""
    if is_jit_tracing() or is_fx_tracing():
        return True
    return len_torch_dispatch_stack() > 0 and any(map(get_dispatch_mode, TRACING))
