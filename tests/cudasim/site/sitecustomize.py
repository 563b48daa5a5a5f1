"""Makes each Python that runs on simulated CUDA use NCCL's stand-in, as soon as it imports torch.distributed.

The folder of this module is first in PYTHONPATH, so Python imports the module at its start. A program that never
imports torch pays nothing.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

WATCHED = "torch.distributed.distributed_c10d"


class Watcher(MetaPathFinder):
    """Installs the stand-in when `WATCHED` is imported, before any code can get NCCL's group from it."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the usual spec of `WATCHED`, with an `exec_module` that then installs the stand-in."""
        if name != WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_install(module: ModuleType) -> None:
            execute(module)
            _collectives().install(module)

        spec.loader.exec_module = execute_and_install
        return spec


def _collectives() -> ModuleType:
    """Load collectives.py by its path: the program's own path may not lead to the package of these tests."""
    file = Path(__file__).resolve().parents[1] / "collectives.py"
    spec = importlib.util.spec_from_file_location("cudasim_collectives", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if "libcudasim" in os.environ.get("LD_PRELOAD", ""):
    sys.meta_path.insert(0, Watcher())
