"""The executor as those see it that run a part of a region."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from memplug.device.device import Device
from memplug.tokenwise.engine.hooks import Hooks


class Runs(Protocol):
    """See `memplug.tokenwise.engine.executor.Executor`."""

    core: Any
    device: Device
    hooks: Hooks
    functions: Any

    @property
    def recomputing(self) -> int:
        """Recompute passes under way on this thread that run the module again."""

    def rerunning(self, unit_states: Iterable[tuple[Any, Any]] = ()) -> AbstractContextManager[None]:
        """Such a pass is under way."""

    def next_state(self, unit: Any) -> Any:
        """Such a pass runs a unit: what that needs to run as it ran."""

    def is_alone(self) -> bool:
        """There is one rank."""
