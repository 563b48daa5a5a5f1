"""The native core, told what operators are."""

from __future__ import annotations

import functools
import logging
from typing import Any

from memplug import native
from memplug.errors import NativeError
from memplug.execute import operators

log = logging.getLogger("memplug")


@functools.cache
def core() -> Any:
    """The core's module; None where it cannot be built, which is said once: regions are opaque then."""
    try:
        module = native.load()
    except NativeError as error:
        log.warning(
            "memplug: every region is opaque without the native core: its input is swapped, all else is recomputed by "
            "running the module again (see `memplug doctor`): %s",
            error,
        )
        return None
    module.describe_operators(operators.describe)
    return module
