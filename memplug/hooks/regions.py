"""Makes modules run as regions: swaps their class for a subclass whose forward goes through the executor.

A class swap (as FSDP2's `fully_shard` does) rather than an instance's `forward`: copies and pickles of the module stay
plain modules, `isinstance` holds, and putting the class back undoes it.
"""

from __future__ import annotations

import copyreg
import fnmatch
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from memplug.errors import ConflictError, RegionError
from memplug.execute.tokenwise import Region
from memplug.session import Session

_REGION = "_memplug_region"
Prepare = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


class _Bound:
    """What a region module carries: the region, its session, and what the host wants done to the arguments; or the root
    of a model without regions, the session alone.
    """

    def __init__(self, region: Region | None, session: Session, prepare: Prepare | None):
        self.region, self.session, self.prepare = region, session, prepare


def matching_modules(model: nn.Module, patterns: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Modules whose qualified name matches a glob pattern, in the model's order.

    A `*` stays within one part of a name: "model.layers.*" is every layer, and nothing inside of one.

    Raises:
        RegionError: a pattern matches no module, or a match lies inside another.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in modules):
            near = [name for name in modules if name.count(".") == pattern.count(".")] or list(modules)
            raise RegionError(
                f'the pattern "{pattern}" in "tokenwise.regions" matches no module of {type(model).__name__}; '
                f"it has for example {near[:3]}"
            )
    found = [(name, module) for name, module in modules.items() if any(_matches(name, p) for p in patterns)]
    check_not_nested([name for name, _ in found])
    for name, module in found:
        if type(module).forward is nn.Module.forward:
            raise RegionError(
                f"module {name}, a {type(module).__name__}, is never called itself",
                f'Name what it contains, for example ["{name}.*"] in "tokenwise.regions".',
            )
    return found


def check_not_nested(names: Sequence[str]) -> None:
    """Raises `RegionError` where one region contains another."""
    known = set(names)
    for name in names:
        parts = name.split(".")
        outer = next((".".join(parts[:i]) for i in range(1, len(parts)) if ".".join(parts[:i]) in known), None)
        if outer is not None:
            raise RegionError(f"region {name} lies inside region {outer}")


def make_region(
    module: nn.Module, region: Region, session: Session, prepare: Prepare | None = None
) -> Callable[[], None]:
    """Let a module's forward run as a region; returns how to undo it.

    Args:
        prepare: called before a forward with gradients; returns the arguments to use.

    Raises:
        ConflictError: the module is a region of another session already, or its forward was replaced.
    """
    if _REGION in module.__dict__:
        raise ConflictError(
            f"module {region.name} is attached to another memplug session", "Detach that session first."
        )
    if module.__dict__.get("_compiled_call_impl") is not None or hasattr(module, "_orig_mod"):
        raise ConflictError(
            f"module {region.name} is compiled, and memplug needs to see its operators",
            "Attach to the model before it is compiled, and do not compile the regions themselves.",
        )
    if "forward" in module.__dict__:
        raise ConflictError(
            f"the forward of module {region.name} was replaced on the instance, so that memplug's would never run",
            "Attach memplug before whatever replaces it, or undo that.",
        )
    return _bind(module, _region_class(type(module)), _Bound(region, session, prepare))


def mark(model: nn.Module, session: Session) -> Callable[[], None]:
    """Remember that a model without regions is attached; returns how to undo it."""
    return _bind(model, _marked_class(type(model)), _Bound(None, session, None))


def _bind(module: nn.Module, subclass: type, bound: _Bound) -> Callable[[], None]:
    original = type(module)
    module.__class__ = subclass
    object.__setattr__(module, _REGION, bound)

    def undo() -> None:
        if type(module) is subclass:
            module.__class__ = original
        module.__dict__.pop(_REGION, None)

    return undo


def session_of(model: nn.Module) -> Session | None:
    """The session that the model, or a part of it, is attached to."""
    return next((module.__dict__[_REGION].session for module in model.modules() if _REGION in module.__dict__), None)


@functools.cache
def _region_class(original: type) -> type:
    """A subclass of `original` that runs as a region."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        bound = self.__dict__.get(_REGION)
        call = functools.partial(original.forward, self)
        if bound is None or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        bound.session.begin_forward()
        if bound.prepare is not None:
            args, kwargs = bound.prepare(self, args, kwargs)
        return bound.session.executor.run(bound.region, call, args, kwargs)

    functools.update_wrapper(forward, original.forward)
    # compiled code has no operators to see: `torch.compile` of the whole model goes around its regions
    return _subclass(original, forward=torch.compiler.disable(forward))


@functools.cache
def _marked_class(original: type) -> type:
    """A subclass of `original` that runs as it does."""
    return _subclass(original)


def _subclass(original: type, **members: Any) -> type:
    """One that calls itself the same, and is copied and pickled as the original."""

    def reduce(self: nn.Module, protocol: int) -> Any:
        state = {key: value for key, value in self.__dict__.items() if key != _REGION}
        # the state apart from the arguments, so that modules that refer to one another in a circle can be copied
        return copyreg._reconstructor, (original, object, None), state

    named = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    return type(original)(original.__name__, (original,), {**named, "__reduce_ex__": reduce, **members})


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))
