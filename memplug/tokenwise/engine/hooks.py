"""The functions of the session and of frameworks that an executor calls while it runs regions.

Frameworks add functions to the lists once the executor exists. Detaching the session empties the lists.
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
        explain: called with phase, region and error when an out-of-memory error of the device is raised.
        on_larger: called when a plain region gets larger arguments than in the step that its plan was made from.
        own: returns a context for memplug's own operators, which the recorder must not add to the program.
        around: functions that return a context for a region's forward (phase "forward") or recompute pass
            ("recompute").
        gathered: functions that return a context which gathers the region's parameters. It is for recompute passes that
            run the tape's operators instead of the module.
        surroundings: functions that note a state of the framework on which random operators depend. Each returns a
            function that makes a context with this state, see `memplug.tokenwise.engine.ambient`.
        scratch: functions that return whether a tensor is in a scratch buffer owned by the framework. Such a tensor is
            never captured or restored.
    """

    explain: Callable[[str, Region, BaseException], None] = _nothing
    on_larger: Callable[[], None] = _nothing
    own: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    around: list[Callable[[str, Region], AbstractContextManager[Any]]] = field(default_factory=list)
    gathered: list[Callable[[Region], AbstractContextManager[Any]]] = field(default_factory=list)
    surroundings: list[Callable[[], Callable[[], AbstractContextManager[Any]]]] = field(default_factory=list)
    scratch: list[Callable[[torch.Tensor], bool]] = field(default_factory=list)
