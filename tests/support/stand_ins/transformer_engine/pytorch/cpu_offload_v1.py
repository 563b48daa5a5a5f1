"""Offloading of activations by Transformer Engine itself: named, and not stood in for."""

from __future__ import annotations

import contextlib
from typing import Any


def is_cpu_offload_enabled() -> bool:
    """It is not."""
    return False


def mark_activation_offload(*tensors: Any) -> None:
    """Nothing is offloaded."""


def get_cpu_offload_context(enabled: bool = False, *args: Any, **kwargs: Any) -> Any:
    """A context and a function that do nothing; raises NotImplementedError where it is enabled."""
    if enabled:
        raise NotImplementedError("the stand-in of Transformer Engine does not offload")
    return contextlib.nullcontext(), lambda tensor: tensor
