"""Caches the subclasses that memplug derives from modules' classes, one for each class."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable


def once_for_each_class(derive: Callable[[type], type]) -> Callable[[type], type]:
    """Cache the results of `derive` by weak references: a class that a function defines may keep a model alive."""
    known: weakref.WeakValueDictionary[int, type] = weakref.WeakValueDictionary()

    @functools.wraps(derive)
    def derived(original: type) -> type:
        found = known.get(id(original))  # `found` references `original`, so the id is not reused meanwhile
        if found is None:
            found = known[id(original)] = derive(original)
        return found

    return derived
