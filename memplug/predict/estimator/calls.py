"""Which module's forward is under way where a program reads values, of a real step and on the virtual device alike."""

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
class Call:
    """One forward of one module; or what a backward does outside of them.

    Attributes:
        path: of the module; None: there is none.
        number: of the module's calls in one forward of the model, from 0.
        recomputes: it runs in a backward, as of `torch.utils.checkpoint`.
        asked: by line and operator, how many values it has read.
    """

    path: str | None
    number: int = 0
    recomputes: bool = False
    asked: Counter[tuple[str, str]] = field(default_factory=Counter)


class Calls:
    """Follows the forwards of modules, until `undo`.

    A module's class is swapped, as a region's is: what calls `forward` itself, as checkpoints do, is followed too.

    Args:
        modules: by path; that of the model is "".
        began, ended: told of each call; `ended` only where it raised nothing.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        began: Callable[[Call], None] = lambda call: None,
        ended: Callable[[Call], None] = lambda call: None,
    ):
        self._began, self._ended = began, ended
        self._paths = {id(module): path for path, module in modules.items()}
        self._under_way: list[Call] = []
        self._numbers: Counter[str] = Counter()
        self._backward = Call(None)
        self._undo = contextlib.ExitStack()
        self.forwards = 0
        """Of the model, those under way included."""
        follower = functools.cache(self._class)
        for path, module in modules.items():
            if "forward" in vars(module):  # replaced on the instance
                self._replace(module, path)
            elif type(module).forward is not nn.Module.forward and not isinstance(module, torch.jit.ScriptModule):
                self._swap(module, follower(type(module)))

    @property
    def now(self) -> Call | None:
        """The innermost one; None: neither a forward nor a backward is under way."""
        if self._under_way:
            return self._under_way[-1]
        return self._backward if _in_backward() else None

    def undo(self) -> None:
        """Modules have their own classes back."""
        self._undo.close()

    @contextlib.contextmanager
    def _call(self, path: str) -> Iterator[None]:
        call = Call(path, recomputes=_in_backward())
        if not call.recomputes:
            if path == "":
                self.forwards += 1
                self._numbers.clear()
                self._backward = Call(None)
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
    """The innermost line of the program, as "model.py:12": not of torch, nor of memplug; "" where there is none."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_PROGRAM):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else ""


def _in_backward() -> bool:
    return current_graph_task_id() != -1
