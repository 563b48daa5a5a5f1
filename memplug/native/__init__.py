"""The native core: the C++ of all rooms, built on first use as one library (`memplug.native.building`).

`memplug.predict.virtual.native` and `memplug.arena.native.packing` are apart from it. The last one is plain C++, which
knows no torch and imports none.
"""

from __future__ import annotations

import functools
import logging
import sys
from pathlib import Path
from types import ModuleType

from memplug.errors import NativeError
from memplug.native.building import Extension
from memplug.native.cuda_calls import not_handed_on

log = logging.getLogger("memplug")

FOLDERS = (
    *("tokenwise/native/tape", "tokenwise/native/transfer", "tokenwise/native/units"),
    *("swap/native", "arena/native", "profile/native", "device/native"),
)
_PACKAGE = Path(__file__).parent.parent

CORE = Extension(
    "memplug_native",
    "native core",
    (Path(__file__).parent, *(_PACKAGE / folder for folder in FOLDERS)),
    tuple(
        tuple(names.split())
        for names in (
            "ambient arguments as_written forward_module module running saved_type swap_module transfer_module "
            "withheld writes",
            "again captures decisions flow following forward frame given giving_back modes noting_units observer "
            "operators saving sequence",
            "literals storages tape unfilled units",
            "followed_step leaving relief repeated_step returning short_step storage_swapper swap_list swap_step",
            "clock exchange host_rows operator_names replay rounding streams transfer",
            "arena arena_plan cpu_allocator leftovers requests serving",
            "cuda_allocator cuda_arena cuda_device other_allocator",
        )
    ),
)


@functools.cache
def load() -> ModuleType:
    """The core's Python module; built first where that was not done yet (a minute or two).

    Raises:
        NativeError: it cannot be built here: no compiler, no ninja, no folder to write to. Or it cannot be loaded. Or
            Python runs without its lock.
    """
    is_new = not CORE.is_built()
    module = CORE.load()
    if is_new and (calls := not_handed_on()):
        log.warning("memplug: with the arena, torch's CUDA allocator does not get these calls: %s", "; ".join(calls))
    # free-threaded Python takes the lock back as it loads the core, unless it was told not to
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise NativeError(
            f"this Python runs without its lock (PYTHON_GIL=0), which guards memplug's {CORE.what}",
            "Leave out `PYTHON_GIL=0` and `-X gil=0`: Python turns its lock on as it loads the core.",
        )
    return module
