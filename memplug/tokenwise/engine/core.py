"""The native core, told what operators are and what it calls of Python."""

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
    """Return the core's module.

    Raises:
        NativeError: it cannot be built here.
    """
    module = native.load()
    module.describe_operators(operators.describe)
    calls.bind(module)
    return module


class Watching:
    """Stands before exchanges and hears of garbage collections, for all executors of the process, while there is one.

    What a collection runs, finalizers of whatever has died, is no operator of a region.
    """

    def __init__(self) -> None:
        self._executors = self._collections = 0

    def begin(self) -> None:
        """Begin, or go on, until `end` was called as often."""
        if not self._executors:
            core().stand_before_exchanges()
            if self._collect not in gc.callbacks:
                gc.callbacks.append(self._collect)
        self._executors += 1

    def end(self) -> None:
        """End, where all that began have ended. In a collection its callback stays, until another last one ends."""
        self._executors -= 1
        if not self._executors:
            core().leave_exchanges()
            if not self._collections:
                gc.callbacks.remove(self._collect)

    def _collect(self, phase: str, info: Any) -> None:
        if phase == "start":
            self._collections += 1
            core().pause()
        elif self._collections:  # else the collection began before this callback was there
            self._collections -= 1
            core().resume()


watching = functools.cache(Watching)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Operators inside are not a region's own: neither noted nor replayed (parameter gathering, hooks)."""
    known = core()
    known.pause()
    try:
        yield
    finally:
        known.resume()


def in_framework() -> AbstractContextManager[Any]:
    """Operators inside are a framework's own (gathering, reducing), by which steps are not compared."""
    return core().InFramework()
