"""Runs modules as regions: replaces a module's class by a subclass whose forward goes through the executor.

Like FSDP2's `fully_shard`, memplug replaces the module's class. It does not replace the instance's `forward`, because
copies and pickles of the module would contain that. So copies and pickles are plain modules, `isinstance` holds, and
restoring the class undoes the change.
"""

from __future__ import annotations

import copyreg
import difflib
import fnmatch
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from memplug.errors import ConflictError, RegionError
from memplug.hooks import checkpointing
from memplug.hooks.derived import once_for_each_class
from memplug.hooks.tracing import nothing, outside
from memplug.session.attached import AttachedModel
from memplug.tokenwise.engine.region import Region
from memplug.torch_private import COMPILED_CALL

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Attributes in which wrappers (DistributedDataParallel, engines, torch.compile, FSDP, checkpointing) hold a module."""

_REGION, UNIT = "_memplug_region", "_memplug_unit"
Call = Callable[..., Any]
Prepare = Callable[[nn.Module, Call, tuple[Any, ...], dict[str, Any]], tuple[Call, tuple[Any, ...], dict[str, Any]]]
"""Maps a region's module, its forward and the arguments to the function to call and its arguments."""


class _Bound:
    """Binds a module to its session, by giving the module a subclass of its own class.

    The module is either a region or the root of a model without regions. For a region, `prepare` makes the framework's
    changes to the arguments of its forward.
    """

    def __init__(
        self, module: nn.Module, attached: AttachedModel, region: Region | None = None, prepare: Prepare | None = None
    ):
        self.attached, self.region, self.prepare = attached, region, prepare
        self.changes_arguments = False
        self._module = module
        self._bind()

    def _bind(self) -> None:
        module, own = self._module, type(self._module)
        self._own, self._subclass = own, _marked_class(own) if self.region is None else _region_class(own)
        module.__class__ = self._subclass
        object.__setattr__(module, _REGION, self)

    def enter(self) -> bool:
        """Replace the module's class by the subclass.

        Returns:
            False, with nothing changed, if the module is bound already, or its forward was replaced or compiled.
        """
        if any(name in self._module.__dict__ for name in (_REGION, "forward")) or _is_compiled(self._module):
            return False
        self._bind()
        return True

    def leave(self) -> bool:
        """Restore the module's own class.

        Returns:
            False, with nothing changed, if the region changes the forward's arguments or replaces the module's
            checkpointing, or if other code has replaced the module's class.
        """
        if self.changes_arguments or type(self._module) is not self._subclass:
            return False
        if getattr(self._module, checkpointing.FLAG, False):  # the module's own class would checkpoint again
            return False
        self.undo()
        return True

    def undo(self) -> None:
        """Unbind the module for good, and restore its own class unless the class was replaced since."""
        module = self._module
        if module.__dict__.get(_REGION) is self:
            if type(module) is self._subclass:
                module.__class__ = self._own
            del module.__dict__[_REGION]


def matching_modules(model: nn.Module, patterns: Sequence[str]) -> tuple[list[tuple[str, nn.Module]], list[str]]:
    """Return the modules whose name matches a glob pattern, in the model's order, and the patterns without a match.

    A `*` stays within one part of a name: "model.layers.*" matches every layer, and nothing inside a layer. A pattern
    may leave out the parts of a name that wrappers add (`WRAPPERS`). A wrapper and its module count as one module, the
    inner one. If a pattern matches both modules with a forward and lists of modules, the lists are left out.

    Raises:
        RegionError: a pattern matches only modules that are never called, or a match lies inside another.
        ConflictError: a match is compiled.
    """
    modules, written = modules_as_written(model)
    names: set[str] = set()
    missing = []
    for pattern in patterns:
        matches = [name for name in modules if _matches(pattern, name, written[name])]
        called = [name for name in matches if is_called(modules[name])]
        if matches and not called:
            name = matches[0]
            raise RegionError(
                f"module {name}, a {type(modules[name]).__name__}, is never called itself",
                f'Name the modules in it, for example ["{name}.*"] in "tokenwise.regions".',
                code="MP001",
            )
        names.update(called)
        if not matches:
            missing.append(pattern)
    found = [(name, module) for name, module in modules.items() if name in names]
    check_not_nested([name for name, _ in found])
    for name, _ in found:
        if name.endswith("._orig_mod"):
            _refuse_compiled(written[name])
    return found, missing


def refuse_missing(pattern: str, model: nn.Module) -> NoReturn:
    """Raise `RegionError` for a pattern that matches no module of the model."""
    raise RegionError(
        f'the pattern "{pattern}" in "tokenwise.regions" matches no module of {type(model).__name__}; '
        f"patterns that match, the nearest first: {_nearest(pattern, *modules_as_written(model))}",
        "Patterns are globs, not regular expressions, for whole names in `model.named_modules()`; "
        '`*`, `?` and `[0-3]` stay within one part, between dots: "model.layers.*" is every layer, '
        '"model.layers.*.mlp" the MLP of each.',
        code="MP001",
    )


def modules_as_written(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return a model's modules except wrappers, and each module's name as written: without the wrappers' parts.

    Returns:
        (modules by name, names as written by name). A wrapper and its module have the same name as written.
    """
    named = dict(model.named_modules())
    written = {name: as_written(name, named) for name in named}
    innermost = {written[name]: name for name in named}  # a wrapper and its module share a name: the module wins
    return {name: named[name] for name in innermost.values() if written[name]}, written


def is_called(module: nn.Module) -> bool:
    """Return whether a module has a forward; a list of modules has none."""
    return type(module).forward is not nn.Module.forward


def may_run_as_region(module: nn.Module) -> bool:
    """Return whether the module's class can be subclassed, and its forward exists, uncompiled and not replaced."""
    if isinstance(module, torch.jit.ScriptModule) or "forward" in module.__dict__ or _is_compiled(module):
        return False
    try:
        _region_class(type(module))
    except TypeError:  # the class cannot be subclassed
        return False
    return is_called(module)


def check_not_nested(names: Sequence[str]) -> None:
    """Raise `RegionError` if one region contains another."""
    for name in names:
        outer = next((other for other in names if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise RegionError(f"region {name} lies inside region {outer}")


def make_region(
    module: nn.Module, region: Region, attached: AttachedModel, prepare: Prepare | None = None
) -> Callable[[], None]:
    """Make a module's forward run as a region; return the function that undoes it.

    Args:
        module: the module.
        region: the region that its forward runs as.
        attached: the session.
        prepare: changes or checks the arguments before each forward with gradients; None if there is nothing to do.

    Raises:
        ConflictError: the module is attached to another session, is compiled, or has a replaced forward.
    """
    if _REGION in module.__dict__:
        raise ConflictError(
            f"module {region.name} is attached to another memplug session", "Detach that session first."
        )
    if _is_compiled(module):
        _refuse_compiled(region.name)
    if "forward" in module.__dict__:
        raise ConflictError(
            f"the forward of module {region.name} was replaced on the instance, so memplug's would never run",
            "Attach memplug before the tool that replaces it, or undo that.",
            code="MP003",
        )
    bound = _Bound(module, attached, region, prepare)
    attached.plain.add(region, bound)
    return bound.undo


def mark(model: nn.Module, attached: AttachedModel) -> Callable[[], None]:
    """Bind the root of a model without regions to its session; return the function that undoes it."""
    return _Bound(model, attached).undo


def attached_to(model: nn.Module) -> AttachedModel | None:
    """Return the session that the model or a part of it is attached to, or None."""
    return next((module.__dict__[_REGION].attached for module in model.modules() if _REGION in module.__dict__), None)


@once_for_each_class
def _region_class(original: type) -> type:
    """Return a subclass of `original` whose forward runs as a region."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        bound = self.__dict__.get(_REGION)
        call = functools.partial(original.forward, self)
        if bound is None:
            return call(*args, **kwargs)
        if not torch.is_grad_enabled():
            checkpointing.reentrant_checkpoints().see(bound.region.name, bound.attached)
            return call(*args, **kwargs)
        bound.attached.begin_forward()
        if bound.prepare is not None:
            own = call
            call, args, kwargs = bound.prepare(self, call, args, kwargs)
            bound.changes_arguments = call is not own
        return bound.attached.executor.run(bound.region, call, args, kwargs)

    forward = functools.update_wrapper(outside(forward, original.forward), original.forward)
    members = (
        {checkpointing.FUNCTION: checkpointing.LayersFunction(_session_of)}
        if hasattr(original, checkpointing.FLAG)
        else {}
    )
    return subclass(original, forward=forward, __prepare_scriptable__=_refuse_script, **members)


def _session_of(module: nn.Module) -> AttachedModel | None:
    bound = module.__dict__.get(_REGION)
    return bound.attached if bound is not None else None


@once_for_each_class
def _marked_class(original: type) -> type:
    """Return a subclass of `original` that reports forwards with gradients to the session, and runs them unchanged."""

    def begin(self: nn.Module) -> None:
        bound = self.__dict__.get(_REGION)
        if bound is not None and torch.is_grad_enabled():
            bound.attached.begin_forward()

    begin = outside(begin, nothing)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        begin(self)
        return original.forward(self, *args, **kwargs)

    forward = functools.update_wrapper(forward, original.forward)
    return subclass(original, forward=forward, __prepare_scriptable__=_refuse_script)


def subclass(original: type, **members: Any) -> type:
    """Return a subclass with the name of `original`; copies and pickles of its instances have the class `original`."""

    def reduce(self: nn.Module, protocol: int) -> Any:
        state = {key: value for key, value in self.__dict__.items() if key not in (_REGION, UNIT)}
        # pass the state apart from the arguments, so that modules that reference each other can be copied
        return copyreg._reconstructor, (original, object, None), state

    named = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    return type(original)(original.__name__, (original,), {**named, "__reduce_ex__": reduce, **members})


def _is_compiled(module: nn.Module) -> bool:
    return module.__dict__.get(COMPILED_CALL) is not None or hasattr(module, "_orig_mod")


def _refuse_compiled(name: str) -> None:
    raise ConflictError(
        f"module {name} is compiled, and memplug needs to see its operators",
        "Attach to the model before it is compiled, and do not compile the regions themselves: `torch.compile` of the "
        "whole model goes around them.",
        code="MP003",
    )


def _refuse_script(module: nn.Module) -> NoReturn:
    raise ConflictError(
        f"torch.jit.script was given a {type(module).__name__} that memplug is attached to, and compiles the source of "
        "its original class",
        "Call `session.detach()` before, or use `torch.export.export` or `torch.jit.trace`, which run the model.",
        code="MP003",
    )


def _matches(pattern: str, *names: str) -> bool:
    """Return whether a pattern matches one of a module's names, part by part."""
    patterns = pattern.split(".")
    split = [name.split(".") for name in names]
    return any(len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns)) for parts in split)


def _nearest(pattern: str, modules: Mapping[str, nn.Module], written: Mapping[str, str]) -> str:
    """Return, as text, the patterns most similar to `pattern` that match callable modules."""
    called = [name for name, module in modules.items() if is_called(module)]
    patterns = dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", written[name]) for name in called)
    return ", ".join(f'"{each}"' for each in difflib.get_close_matches(pattern, patterns, cutoff=0)) or "none"


def as_written(name: str, named: Mapping[str, nn.Module]) -> str:
    """Return a module's name without the parts that wrappers add; a wrapper has exactly one child."""
    parts = name.split(".") if name else []
    outer = [named[".".join(parts[:at])] for at in range(len(parts))]
    return ".".join(
        part for part, parent in zip(parts, outer, strict=True) if part not in WRAPPERS or len(parent._modules) > 1
    )
