"""Replaces what a program calls by what the virtual device does, for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from memplug.errors import PatchError

NOT_ITS_OWN = object()


@contextlib.contextmanager
def replaced(target: Any, name: str, value: Any, versions: str) -> Iterator[None]:
    """Within, the attribute of a class or module is `value`.

    Args:
        versions: in which the attribute is known, as in "deepspeed 0.19".

    Raises:
        PatchError: there is no such attribute.
    """
    if not hasattr(target, name):
        raise PatchError(f"{getattr(target, '__name__', target)}.{name}", versions)
    before = vars(target).get(name, NOT_ITS_OWN)
    setattr(target, name, value)
    try:
        yield
    finally:
        if before is NOT_ITS_OWN:
            delattr(target, name)
        else:
            setattr(target, name, before)
