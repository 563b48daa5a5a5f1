"""Patches frameworks' functions; each patch carries a mark and the original, and detaching undoes it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from memplug.errors import PatchError
from memplug.session.attached import AttachedModel
from memplug.tokenwise.engine.core import in_framework, paused

ORIGINAL = "__memplug_original__"


def patch(target: Any, name: str, wrapper: Callable[..., Any], attached: AttachedModel, versions: str) -> None:
    """Replace an attribute of an instance, class or module by `wrapper(original, ...)`, until the session detaches.

    Args:
        target: the instance, class or module.
        name: name of the attribute.
        wrapper: called with the original and the arguments.
        attached: the session.
        versions: the versions that have the attribute, as in "deepspeed 0.16 to 0.19".

    Raises:
        PatchError: there is no such attribute.
    """
    original = getattr(target, name, None)
    if original is None:
        owner = getattr(target, "__name__", type(target).__name__)
        raise PatchError(f"{owner}.{name}", versions)

    patched = wrapped(original, wrapper)
    # bypass the `__setattr__` of modules, which registers parameters and submodules
    put = type.__setattr__ if isinstance(target, type) else object.__setattr__
    put(target, name, patched)

    def undo() -> None:
        below, top = getattr(patched, ORIGINAL), vars(target).get(name)
        while top is not patched and hasattr(top, ORIGINAL):  # another session has patched it since
            if getattr(top, ORIGINAL) is patched:
                _put_original(top, below)
                return
            top = getattr(top, ORIGINAL)
        if top is not patched:
            return  # other code has patched it since, and may call `patched`, which has no effect after detaching
        delattr(target, name)
        if getattr(target, name, None) != below:  # the target did not inherit the original
            put(target, name, below)

    attached.at_detach(undo)


def wrapped(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `wrapper(original, ...)`, marked as memplug's."""

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return wrapper(getattr(patched, ORIGINAL), *args, **kwargs)

    _put_original(patched, original)
    return patched


def unnoticed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the original outside of all regions: memplug does not note, replay or compare its operators.

    Pass this function to `patch` as `wrapper`.
    """
    with paused(), in_framework():
        return original(*args, **kwargs)


def uncompared(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the original as a framework's own work: its operators do not count when memplug compares steps.

    Pass this function to `patch` as `wrapper`.
    """
    with in_framework():
        return original(*args, **kwargs)


def put_back(module: Any, *names: str) -> None:
    """Restore the named functions of a module, if results of `wrapped` stand in their place."""
    for name in names:
        original = getattr(getattr(module, name, None), ORIGINAL, None)
        if original is not None:
            setattr(module, name, original)


def _put_original(patched: Any, original: Callable[..., Any]) -> None:
    setattr(patched, ORIGINAL, original)
    patched.__wrapped__ = original


def is_patched(target: Any, name: str) -> bool:
    """Return whether the attribute is one of memplug's patches."""
    return hasattr(vars(target).get(name), ORIGINAL)
