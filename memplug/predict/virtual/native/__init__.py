"""The C++ of the virtual device, built on first use.

It depends on no other C++ of memplug, just as CUDA does not. Use it through `memplug.predict.virtual`.
"""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType

from memplug.native.building import Extension

VIRTUAL = Extension("memplug_virtual", "virtual device", (Path(__file__).parent,))


@functools.cache
def load() -> ModuleType:
    """Return the native module; build it first if needed, which takes half a minute.

    Raises:
        NativeError: The module cannot be built (no compiler, no ninja, or no writable folder) or cannot be loaded.
    """
    return VIRTUAL.load()
