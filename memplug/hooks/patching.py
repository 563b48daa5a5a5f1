"""How a hook replaces a framework's function: marked, with the original kept, undone when the session detaches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from memplug.errors import PatchError
from memplug.session.attached import AttachedModel
from memplug.tokenwise.engine.core import in_framework, paused

ORIGINAL = "__memplug_original__"


def patch(target: Any, name: str, wrapper: Callable[..., Any], attached: AttachedModel, versions: str) -> None:
    """Replace an attribute of one instance, class or module by `wrapper(original, ...)`, until the session detaches.

    Args:
        versions: in which the attribute is known, as in "deepspeed 0.16 to 0.19".

    Raises:
        PatchError: there is no such attribute.
    """
    original = getattr(target, name, None)
    if original is None:
        owner = getattr(target, "__name__", type(target).__name__)
        raise PatchError(f"{owner}.{name}", versions)

    patched = wrapped(original, wrapper)
    # past the `__setattr__` of modules, which sorts what it is given
    put = type.__setattr__ if isinstance(target, type) else object.__setattr__
    put(target, name, patched)

    def undo() -> None:
        below, top = getattr(patched, ORIGINAL), vars(target).get(name)
        while top is not patched and hasattr(top, ORIGINAL):  # patched again since, by another session
            if getattr(top, ORIGINAL) is patched:
                _put_original(top, below)
                return
            top = getattr(top, ORIGINAL)
        if top is not patched:
            return  # by someone else, who goes through `patched`, which a detached session ignores
        delattr(target, name)
        if getattr(target, name, None) != below:  # it was not inherited
            put(target, name, below)

    attached.at_detach(undo)


def wrapped(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """`wrapper(original, ...)`, marked as ours."""

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return wrapper(getattr(patched, ORIGINAL), *args, **kwargs)

    _put_original(patched, original)
    return patched


def unnoticed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A wrapper for `patch`, of what is no part of a region: operators are neither noted nor replayed, nor compared."""
    with paused(), in_framework():
        return original(*args, **kwargs)


def uncompared(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A wrapper for `patch`, of what a framework does beside the model: steps are not compared by its operators."""
    with in_framework():
        return original(*args, **kwargs)


def put_back(module: Any, *names: str) -> None:
    """Put the originals of a module's functions back where `wrapped` ones are in their places."""
    for name in names:
        original = getattr(getattr(module, name, None), ORIGINAL, None)
        if original is not None:
            setattr(module, name, original)


def _put_original(patched: Any, original: Callable[..., Any]) -> None:
    setattr(patched, ORIGINAL, original)
    patched.__wrapped__ = original


def is_patched(target: Any, name: str) -> bool:
    """Whether the attribute is a patch of ours."""
    return hasattr(vars(target).get(name), ORIGINAL)
