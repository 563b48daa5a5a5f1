"""Keeps garbage collection out of regions: finalizers of whatever has died may run operators in the middle of one."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memplug.execute.tokenwise import Executor


@contextlib.contextmanager
def outside(executor: Executor) -> Iterator[None]:
    """Operators that a collection on this thread runs are not the region's own: neither noted nor replayed."""
    thread = threading.get_ident()

    def collecting(phase: str, info: dict[str, Any]) -> None:
        if threading.get_ident() == thread:
            executor.pauses += 1 if phase == "start" else -1

    gc.callbacks.append(collecting)
    try:
        yield
    finally:
        gc.callbacks.remove(collecting)
