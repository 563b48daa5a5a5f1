"""Classes derived from a module's own class: one for each class, for as long as anything references it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable


def once_for_each_class(derive: Callable[[type], type]) -> Callable[[type], type]:
    """Return `derive` with a cache of weak references, since a class that a function defines may hold a model."""
    known: weakref.WeakValueDictionary[int, type] = weakref.WeakValueDictionary()

    @functools.wraps(derive)
    def derived(original: type) -> type:
        found = known.get(id(original))  # `found` references `original`, so the id is not reused meanwhile
        if found is None:
            found = known[id(original)] = derive(original)
        return found

    return derived
