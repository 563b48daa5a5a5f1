"""The native core: the C++ of all rooms, built on first use as one library (`memplug.native.building`).

Each folder registers its own part of the Python module (registry.h), so any folder may be absent.

Three libraries are built separately: `memplug.predict.virtual.native`, and two for planners in plain C++ without torch
(`memplug.native.plain`): `memplug.arena.native.packing` and `memplug.tokenwise.plan.rules`.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
from pathlib import Path
from types import ModuleType

from memplug.errors import NativeError
from memplug.native.building import Extension
from memplug.native.cuda_calls import not_handed_on

log = logging.getLogger("memplug")

_PACKAGE = Path(__file__).parent.parent
_INCLUDES_TORCH = re.compile(r"^#include <(?:torch|ATen|c10)/", re.M).search


def _folders() -> tuple[Path, ...]:
    """Return the core's folders: `memplug/native`, and in each room `native` and its subfolders.

    A folder counts only if one of its files includes torch's headers; the others are separate libraries.
    """
    folders = [path for pattern in ("native", "*/native", "*/native/*") for path in sorted(_PACKAGE.glob(pattern))]
    sources = {folder: [*folder.glob("*.cpp"), *folder.glob("*.h")] for folder in folders}
    return tuple(folder for folder in folders if any(_INCLUDES_TORCH(file.read_text()) for file in sources[folder]))


CORE = Extension("memplug_native", "native core", _folders())


@functools.cache
def load() -> ModuleType:
    """Return the core's Python module; the first call builds it, in a minute or two.

    Raises:
        NativeError: the core cannot be built here (no compiler, no ninja, no folder to write to) or loaded, or Python
            runs without the GIL.
    """
    is_new = not CORE.is_built()
    module = CORE.load()
    if is_new and (calls := not_handed_on()):
        text = (
            "memplug: with the arena, torch's CUDA allocator does not get these calls: %s. If the program uses one of "
            'them, set "arena": {"enabled": false}'
        )
        log.warning(text, "; ".join(calls))
    # free-threaded Python turns the GIL on as it loads the core, unless the user forbade that
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise NativeError(
            f"this Python runs without the GIL (PYTHON_GIL=0), which guards memplug's {CORE.what}",
            "Leave out `PYTHON_GIL=0` and `-X gil=0`: Python turns the GIL on as it loads the core.",
        )
    return module
