"""Tasks for tests of planning beside training; this module imports no torch, since the planning process imports it."""

from __future__ import annotations

import os
import subprocess
import sys

from memplug.errors import LayoutError


def fails(problem: str) -> None:
    """Raise an error of memplug's."""
    raise LayoutError(problem, "Do something else.")


def ends_its_process() -> int:
    """Return 7, or end the process if it is a worker."""
    if sys.argv[0].endswith("worker.py"):
        os._exit(3)
    return 7


def imported_with(name: str) -> list[str]:
    """Return the top-level packages that are imported along with a module."""
    code = f"import sys, {name}; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return sorted({each.partition(".")[0] for each in result.stdout.split()})
