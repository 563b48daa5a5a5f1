"""Temporarily replaces attributes of torch, DeepSpeed and Megatron-Core by versions for the virtual device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from memplug.errors import PatchError

NOT_ITS_OWN = object()


@contextlib.contextmanager
def replaced(target: Any, name: str, value: Any, versions: str) -> Iterator[None]:
    """Replace an attribute of a class or module inside the context.

    Args:
        target: The class or module.
        name: The attribute's name.
        value: The new value.
        versions: The versions in which the attribute is known to exist, such as "deepspeed 0.19".

    Raises:
        PatchError: The attribute does not exist.
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
