"""Tasks for tests of what plans beside training: imported by its process too, and so without torch."""

from __future__ import annotations

import os
import subprocess
import sys

from memplug.errors import LayoutError


def fails(problem: str) -> None:
    """Raises an error of memplug's."""
    raise LayoutError(problem, "Do something else.")


def ends_its_process() -> int:
    """Returns 7 in any other process than a worker."""
    if sys.argv[0].endswith("worker.py"):
        os._exit(3)
    return 7


def imported_with(name: str) -> list[str]:
    """Top-level packages that importing a module brings."""
    code = f"import sys, {name}; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return sorted({each.partition(".")[0] for each in result.stdout.split()})
