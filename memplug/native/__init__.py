"""The native core: the C++ of all rooms, built on first use as one library (`memplug.native.building`).

`memplug.predict.virtual.native` is apart from it, and so is what planners use, plain C++ that knows no torch
(`memplug.native.plain`): `memplug.arena.native.packing` and `memplug.tokenwise.plan.rules`.
"""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType

from memplug.native.building import Extension

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
        NativeError: it cannot be built here: no compiler, no ninja, no folder to write to. Or it cannot be loaded.
    """
    return CORE.load()
