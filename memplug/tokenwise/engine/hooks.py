"""The functions of others that an executor calls while it runs regions.

The executor is made first. Frameworks then add to its lists, which are emptied when the session is detached.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from memplug.tokenwise.engine.region import Region


def _nothing(*_: Any) -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class EngineHooks:
    """The functions that an executor calls; by default they do nothing.

    Attributes:
        explain: called with phase, region and error when an error of the device's memory is raised.
        on_larger: called when a plain region gets larger arguments than in the step that its plan was made from.
        own: `with own():` around operators that are no part of the program, for the recorder.
        around: contexts around a region's forward ("forward") and recompute pass ("recompute").
        gathered: contexts around a recompute pass that runs operators alone; they gather the region's parameters.
        surroundings: functions that take a state that random operators depend on, see
            `memplug.tokenwise.engine.ambient`.
        scratch: functions that return whether a tensor is in a scratch buffer owned by the framework: never captured or
            restored.
    """

    explain: Callable[[str, Region, BaseException], None] = _nothing
    on_larger: Callable[[], None] = _nothing
    own: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    around: list[Callable[[str, Region], AbstractContextManager[Any]]] = field(default_factory=list)
    gathered: list[Callable[[Region], AbstractContextManager[Any]]] = field(default_factory=list)
    surroundings: list[Callable[[], Callable[[], AbstractContextManager[Any]]]] = field(default_factory=list)
    scratch: list[Callable[[torch.Tensor], bool]] = field(default_factory=list)
