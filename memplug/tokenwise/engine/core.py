"""The native core, told what operators are."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from memplug import native
from memplug.errors import ConflictError, InPlaceError, RecomputeError
from memplug.tokenwise.engine import operators


@functools.cache
def core() -> Any:
    """Returns the core's module.

    Raises:
        NativeError: it cannot be built here.
    """
    module = native.load()
    module.describe_operators(operators.describe)
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


def fail(kind: int, size: str) -> NoReturn:
    """Raise what a failure of the core means, by `Failure::Kind` in native/transfer/transfer.h."""
    if kind == 0:
        text = f"a captured {size} tensor was modified in place after its region had ended"
        raise InPlaceError(text, code="MP024")
    if kind == 1:
        raise InPlaceError(
            f"a {size} tensor was modified in place after its region had ended and before its copy to the host ended",
            code="MP024",
        )
    if kind == 2:
        raise InPlaceError(
            f"a function with kernels of its own wrote to a {size} tensor from outside of its region, which is not "
            "undone",
            'Give it a copy to write to, or leave the module out of "tokenwise.regions".',
            code="MP024",
        )
    if kind == 4:
        raise InPlaceError(
            "a sparse, nested or quantized tensor from outside of a region was modified in place inside of it, which "
            "is not undone",
            'Modify a clone of it, or leave the module out of "tokenwise.regions".',
            code="MP024",
        )
    if kind == 5:
        raise RecomputeError(
            f"a region asks for a gradient in its own forward, which its forwards before did not, and the {size} "
            "tensor that this needs is gone",
            "Run the step again: from now on the region keeps what it needs until its forward is over.",
            code="MP026",
        )
    if kind == 6:
        raise RecomputeError(
            f"the memory of a {size} tensor that a region reads was taken away between its forward and its backward",
            "Leave parameters and inputs of a region as they are until its backward is over: no `.data = ...`, no "
            "`model.to(...)`, no storage that is resized; a wrapper that frees weights in between has to gather them "
            "again for backward, as FSDP2 does for each layer that it wraps.",
            code="MP025",
        )
    if kind == 7:
        raise RecomputeError(
            f"a captured {size} tensor that backward asks for was given back by an earlier backward",
            "Pass `retain_graph=True` to every backward of a graph but the last. If this graph has only one, please "
            "report it: run `memplug doctor` and attach its output.",
            code="MP025",
        )
    raise ConflictError(
        "backward ran through a graph after its memplug session was detached, and its rows are gone",
        "Run backward on the graphs in flight first, then detach.",
    )
