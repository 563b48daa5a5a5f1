"""Tells when regions run as without memplug: in CUDA graphs, transforms, traces, or without saved-tensor hooks."""

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
    """Decides before each forward with gradients whether regions of one device run as without memplug.

    Each reason is logged once.
    """

    def __init__(self, device: Device):
        self._device = device
        self._told: set[str] = set()

    def is_so(self) -> bool:
        """Return whether a region's forward has to run as without memplug now.

        Replays of a CUDA graph would write to host rows that by then belong to other tensors. Tensors in function
        transforms and in forward-mode differentiation have no memory of their own to swap. Without saved-tensor hooks
        memplug does not learn which tensors backward needs.
        """
        if self._device.is_capturing():
            return self._tell(
                "memplug: regions inside of a CUDA graph run as they are: nothing of them is swapped or recomputed. "
                "To use memplug there, train without the graph"
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
        """Log a message once, and return True."""
        if message not in self._told:
            self._told.add(message)
            log.warning(coded("MP019", message))
        return True


def is_traced() -> bool:
    """Return whether torch traces this forward, or runs it on fake tensors; such a forward trains nothing."""
    if is_jit_tracing() or is_fx_tracing():
        return True
    return len_torch_dispatch_stack() > 0 and any(map(get_dispatch_mode, TRACING))
