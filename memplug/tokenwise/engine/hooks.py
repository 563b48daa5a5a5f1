"""What an executor calls of others while it runs regions. It is made first; frameworks add to its lists,
which are empty again once the session is detached.
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
    """By default."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """By default nothing is done.

    Attributes:
        explain: an error of the device's memory passes, in a phase of a region.
        on_larger: a plain region is given more than in the step that its plan was made from.
        own: `with own():` around operators that are no part of the program, for the recorder.
        around: entered around a region's forward ("forward") and recompute pass ("recompute").
        gathered: entered around a recompute pass that runs operators alone: gathers the region's parameters.
        surroundings: of the states that random operators depend on, see `memplug.tokenwise.engine.ambient`.
        scratch: whether a tensor is in a scratch buffer owned by the framework: never captured or restored.
    """

    explain: Callable[[str, Region, BaseException], None] = _nothing
    on_larger: Callable[[], None] = _nothing
    own: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    around: list[Callable[[str, Region], AbstractContextManager[Any]]] = field(default_factory=list)
    gathered: list[Callable[[Region], AbstractContextManager[Any]]] = field(default_factory=list)
    surroundings: list[Callable[[], Callable[[], AbstractContextManager[Any]]]] = field(default_factory=list)
    scratch: list[Callable[[torch.Tensor], bool]] = field(default_factory=list)
