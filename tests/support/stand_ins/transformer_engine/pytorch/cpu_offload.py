"""The names of Transformer Engine's own offloading of activations, which the stand-in refuses to enable."""

from __future__ import annotations

import contextlib
from typing import Any


def is_cpu_offload_enabled() -> bool:
    """Return False."""
    return False


def mark_activation_offload(*tensors: Any) -> None:
    """Do nothing: this version offloads nothing."""


def get_cpu_offload_context(enabled: bool = False, *args: Any, **kwargs: Any) -> Any:
    """Return a context and a function that do nothing; raise NotImplementedError if enabled."""
    if enabled:
        raise NotImplementedError("the stand-in of Transformer Engine does not offload")
    return contextlib.nullcontext(), lambda tensor: tensor
