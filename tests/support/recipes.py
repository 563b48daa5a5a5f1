"""The modules of both recipes that tests can import without Megatron-Core."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

from tests.support.folders import ROOT

FOLDERS = [ROOT / "examples" / name for name in ("megatron_llama2", "llama2")]
# the recipes' scripts import modules from these folders, which come last, so that they hide no other module
sys.path += [str(folder) for folder in FOLDERS if str(folder) not in sys.path]

checkpoint, checks, context, data, layout, memory, settings, text, tiled_loss = (
    importlib.import_module(name)
    for name in ("checkpoint", "checks", "context", "data", "layout", "memory", "settings", "text", "tiled_loss")
)


def load_train() -> ModuleType:
    """Load examples/llama2/train.py by its path, since the other recipe also has a train.py."""
    spec = importlib.util.spec_from_file_location("llama2_train", ROOT / "examples/llama2/train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
