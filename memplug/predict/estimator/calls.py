"""Follows the module calls of a real or an estimated step, to find the call that reads a value."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memplug.hooks.regions import subclass
from memplug.torch_private import current_graph_task_id

_NOT_THE_PROGRAM = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[2]))


@dataclass(slots=True)
class ModuleCall:
    """One forward of one module, or one backward of the whole model.

    Attributes:
        path: The module's path; None: the call is a backward.
        number: The index of this call among the module's calls in one forward of the model, from 0.
        recomputes: Whether this forward runs in a backward, as forwards of `torch.utils.checkpoint` do.
        asked: The number of values that this call has read, by line and operator.
    """

    path: str | None
    number: int = 0
    recomputes: bool = False
    asked: Counter[tuple[str, str]] = field(default_factory=Counter)


class Calls:
    """Watches the forwards of modules until `undo`.

    Each module gets a subclass of its own class, as regions do. So direct calls of `forward`, which
    `torch.utils.checkpoint` makes, are seen too.

    Args:
        modules: The modules by path; the model's path is "".
        began: Called when a module's forward begins.
        ended: Called when a module's forward ends without an error.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        began: Callable[[ModuleCall], None] = lambda call: None,
        ended: Callable[[ModuleCall], None] = lambda call: None,
    ):
        self._began, self._ended = began, ended
        self._paths = {id(module): path for path, module in modules.items()}
        self._under_way: list[ModuleCall] = []
        self._numbers: Counter[str] = Counter()
        self._backward = ModuleCall(None)
        self._undo = contextlib.ExitStack()
        self.forwards = 0
        """The number of forwards of the model outside of backwards, including one in progress."""
        follower = functools.cache(self._class)
        for path, module in modules.items():
            if "forward" in vars(module):  # an instance attribute hides the subclass's `forward`
                self._replace(module, path)
            elif type(module).forward is not nn.Module.forward and not isinstance(module, torch.jit.ScriptModule):
                self._swap(module, follower(type(module)))

    @property
    def now(self) -> ModuleCall | None:
        """Return the innermost call in progress; None if neither a forward nor a backward is in progress."""
        if self._under_way:
            return self._under_way[-1]
        return self._backward if _in_backward() else None

    def undo(self) -> None:
        """Restore the modules' own classes and forwards."""
        self._undo.close()

    @contextlib.contextmanager
    def _call(self, path: str) -> Iterator[None]:
        call = ModuleCall(path, recomputes=_in_backward())
        if not call.recomputes:
            if path == "":
                self.forwards += 1
                self._numbers.clear()
                self._backward = ModuleCall(None)
            call.number = self._numbers[path]
            self._numbers[path] += 1
        self._began(call)
        self._under_way.append(call)
        try:
            yield
        finally:
            self._under_way.remove(call)
        self._ended(call)

    def _class(self, original: type) -> type:
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = self._paths.get(id(module))
            with self._call(path) if path is not None else contextlib.nullcontext():
                return original.forward(module, *args, **kwargs)

        return subclass(original, forward=functools.update_wrapper(forward, original.forward))

    def _swap(self, module: nn.Module, followed: type) -> None:
        own, module.__class__ = type(module), followed

        def undo() -> None:
            if type(module) is followed:
                module.__class__ = own

        self._undo.callback(undo)

    def _replace(self, module: nn.Module, path: str) -> None:
        own = module.forward

        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with self._call(path):
                return own(*args, **kwargs)

        module.forward = forward
        self._undo.callback(setattr, module, "forward", own)


def line() -> str:
    """Return the innermost source line outside of torch and memplug, such as "model.py:12", or "" if there is none."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_PROGRAM):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else ""


def _in_backward() -> bool:
    return current_graph_task_id() != -1
