"""Loads the native core, and gives it the traits of operators and the Python functions that it calls."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from memplug import native
from memplug.tokenwise.engine import calls, operators


@functools.cache
def core() -> Any:
    """Return the native core's module.

    Raises:
        NativeError: the core cannot be built on this machine.
    """
    module = native.load()
    module.describe_operators(operators.describe)
    calls.bind(module)
    return module


class ProcessWatch:
    """Intercepts exchanges between ranks and follows garbage collections, as long as the process has an executor.

    A collection runs finalizers of dead objects. Operators in a finalizer belong to no region.
    """

    def __init__(self) -> None:
        self._executors = self._collections = 0

    def begin(self) -> None:
        """Count an executor, and start watching with the first one."""
        if not self._executors:
            core().stand_before_exchanges()
            if self._collect not in gc.callbacks:
                gc.callbacks.append(self._collect)
        self._executors += 1

    def end(self) -> None:
        """Count one executor less, and stop watching with the last one.

        If the last executor ends in the middle of a garbage collection, the callback stays registered. It is removed
        when a later executor is the last one to end.
        """
        self._executors -= 1
        if not self._executors:
            core().leave_exchanges()
            if not self._collections:
                gc.callbacks.remove(self._collect)

    def _collect(self, phase: str, info: Any) -> None:
        if phase == "start":
            self._collections += 1
            core().pause()
        elif self._collections:  # else the collection began before this callback was registered
            self._collections -= 1
            core().resume()


watching = functools.cache(ProcessWatch)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Enter a context whose operators (parameter gathering, hooks) belong to no region: neither noted nor replayed."""
    known = core()
    known.pause()
    try:
        yield
    finally:
        known.resume()


def in_framework() -> AbstractContextManager[Any]:
    """Return a context for a framework's operators (gathering, reducing): they do not count when steps are compared."""
    return core().InFramework()
