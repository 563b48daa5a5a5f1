"""A copy of the package without a technique's room."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.support.folders import ROOT


def copy_without(name: str, left: str, folder: Path) -> dict[str, str]:
    """Copy the package without a technique's room, and return the environment in which Python finds the copy.

    Only the room's entry `left` is copied; if `left` is empty, the whole room is missing.
    """
    shutil.copytree(ROOT / "memplug", folder / "memplug", ignore=shutil.ignore_patterns("__pycache__"))
    for entry in (folder / "memplug" / name).iterdir():
        if entry.name != left:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    if not left:
        (folder / "memplug" / name).rmdir()
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
