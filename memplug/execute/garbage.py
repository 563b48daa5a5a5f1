"""Keeps garbage collection out of regions: finalizers of whatever has died may run operators in the middle of one."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Any

from memplug.execute.core import core


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Operators that a collection on this thread runs are not the region's own: neither noted nor replayed."""
    thread, known = threading.get_ident(), core()

    def collecting(phase: str, info: dict[str, Any]) -> None:
        if known is not None and threading.get_ident() == thread:
            known.pause() if phase == "start" else known.resume()

    gc.callbacks.append(collecting)
    try:
        yield
    finally:
        gc.callbacks.remove(collecting)
