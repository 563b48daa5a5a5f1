"""Run a recipe on this rank with the stand-ins of Transformer Engine and flash-attn, as if there were a GPU.

Started by a launcher: `torchrun --nproc-per-node N -m tests.support.stand_in_recipe SCRIPT ARGUMENTS...`.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from unittest import mock

from tests.support import stand_in
from tests.support.folders import ROOT


def main() -> None:
    """Run the script of the command line."""
    stand_in.use()
    del sys.argv[0]
    script = Path(sys.argv[0])
    sys.path[:0] = [str(script.parent), str(ROOT / "examples/llama2")]
    mock.patch.object(importlib.import_module("checks"), "has_gpu", lambda: True).start()
    if script.parent.name == "llama2":
        stand_in.let_transformers_use_flash_attention()
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
