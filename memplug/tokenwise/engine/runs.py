"""The interface of the executor for code that runs a region, or a part of it, again."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from memplug.device.device import Device
from memplug.tokenwise.engine.hooks import EngineHooks


class RegionRunner(Protocol):
    """The attributes and methods of an executor that units and recompute passes use.

    See `memplug.tokenwise.engine.executor.Executor`.
    """

    core: Any
    device: Device
    hooks: EngineHooks
    functions: Any

    @property
    def recomputing(self) -> int:
        """Return the number of nested reruns of modules and units on this thread."""

    def rerunning(self, unit_states: Iterable[tuple[Any, Any]] = ()) -> AbstractContextManager[None]:
        """Return a context in which a module or a unit runs again."""

    def next_state(self, unit: Any) -> Any:
        """Return the state for the next rerun of this unit; None if the forward did not run the unit."""

    def is_alone(self) -> bool:
        """Return whether there is only one rank."""
