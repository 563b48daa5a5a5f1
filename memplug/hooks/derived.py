"""Classes that are derived from a module's own: one of each kind, for as long as anything has it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable


def once_for_each_class(derive: Callable[[type], type]) -> Callable[[type], type]:
    """Returns the function with its results kept, not alive: a class that is made in a function may hold a model."""
    known: weakref.WeakValueDictionary[int, type] = weakref.WeakValueDictionary()

    @functools.wraps(derive)
    def derived(original: type) -> type:
        found = known.get(id(original))  # which it keeps alive
        if found is None:
            found = known[id(original)] = derive(original)
        return found

    return derived
