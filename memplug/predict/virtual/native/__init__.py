"""A device of torch's on which kernels and copies take time instead of doing work: C++ beside this file, built on first
use.

It knows nothing of memplug, as CUDA does not; `memplug.predict.virtual` is how it is used.
"""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType

from memplug.native.building import Extension

VIRTUAL = Extension("memplug_virtual", "virtual device", (Path(__file__).parent,))


@functools.cache
def load() -> ModuleType:
    """Its Python module; built first where that was not done yet (half a minute).

    Raises:
        NativeError: it cannot be built here: no compiler, no ninja, no folder to write to. Or it cannot be loaded.
    """
    return VIRTUAL.load()
