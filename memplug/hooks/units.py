"""Runs parts of a region as units: modules, through a subclass of their class, and hidden functions."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import nn

from memplug.errors import ConflictError
from memplug.hooks.derived import once_for_each_class
from memplug.hooks.regions import UNIT, subclass
from memplug.session.attached import AttachedModel
from memplug.tokenwise.engine.hidden import HiddenFunctions
from memplug.tokenwise.engine.units import Unit


def make_unit(module: nn.Module, unit: Unit, attached: AttachedModel) -> None:
    """Make a module's forward run as a unit, until the session detaches.

    Raises:
        ConflictError: the forward was replaced on the instance.
    """
    if "forward" in module.__dict__:
        raise ConflictError(
            f"the forward of {unit.name}, a {type(module).__name__}, was replaced on the instance: memplug cannot run "
            "it again by itself",
            "Attach memplug before the tool that replaces it, or undo that.",
            code="MP003",
        )
    own, derived = type(module), _unit_class(type(module))
    module.__class__ = derived
    object.__setattr__(module, UNIT, unit)

    def undo() -> None:
        if module.__dict__.get(UNIT) is unit:
            if type(module) is derived:
                module.__class__ = own
            del module.__dict__[UNIT]

    attached.at_detach(undo)


@once_for_each_class
def _unit_class(original: type) -> type:
    """Return a subclass of `original` whose forward runs as a unit."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        unit = self.__dict__.get(UNIT)
        if unit is None or torch.compiler.is_dynamo_compiling():  # Dynamo traces only outside of regions
            return original.forward(self, *args, **kwargs)
        return unit.run(functools.partial(original.forward, self), args, kwargs)

    return subclass(original, forward=functools.update_wrapper(forward, original.forward))


def watch_functions(functions: HiddenFunctions, attached: AttachedModel) -> None:
    """Route every call of a custom autograd function through `functions`, until the session detaches."""
    base = torch.autograd.Function
    original, held = vars(base)["apply"], weakref.ref(functions)

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        call, watching = original.__get__(None, cls), held()  # `original` is C++ from torch 2.15 on: no `__func__`
        return call(*args, **kwargs) if watching is None else watching.apply(cls, call, args, kwargs)

    patched = classmethod(functools.update_wrapper(apply, base.apply))
    base.apply = patched

    def undo() -> None:
        if vars(base).get("apply") is patched:
            base.apply = original  # otherwise other code has patched it since, and still calls `apply`

    def detach() -> None:
        stopped = held()
        if stopped is not None:
            stopped.stop()
        undo()

    attached.at_detach(detach)
    weakref.finalize(functions, undo).atexit = False  # for a session that is dropped without detaching
