"""The interface of the executor for code that runs a part of a region."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from memplug.device.device import Device
from memplug.tokenwise.engine.hooks import EngineHooks


class RegionRunner(Protocol):
    """The part of an executor that units and recompute passes use.

    See `memplug.tokenwise.engine.executor.Executor`.
    """

    core: Any
    device: Device
    hooks: EngineHooks
    functions: Any

    @property
    def recomputing(self) -> int:
        """Return how many recompute passes are running a module again on this thread."""

    def rerunning(self, unit_states: Iterable[tuple[Any, Any]] = ()) -> AbstractContextManager[None]:
        """Return a context for a recompute pass that runs a module again."""

    def next_state(self, unit: Any) -> Any:
        """Return the state with which a recompute pass has to run a unit; None if the forward did not run this unit."""

    def is_alone(self) -> bool:
        """Return whether there is only one rank."""
