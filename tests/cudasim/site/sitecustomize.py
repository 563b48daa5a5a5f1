"""In front of PYTHONPATH, where CUDA is simulated: whatever this Python starts has NCCL's stand-in, once it imports
torch.distributed. Python imports this module by itself; what never imports torch pays for nothing.
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
    """Puts the stand-in in place as soon as `WATCHED` is imported, before anything can take NCCL's group from it."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """`WATCHED` as the usual finder has it, with an `exec_module` that goes on."""
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
    """By its file: the program's path need not lead to the package of these tests."""
    file = Path(__file__).resolve().parents[1] / "collectives.py"
    spec = importlib.util.spec_from_file_location("cudasim_collectives", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if "libcudasim" in os.environ.get("LD_PRELOAD", ""):
    sys.meta_path.insert(0, Watcher())
