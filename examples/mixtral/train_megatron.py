"""Trains a Mixtral with Megatron-Core and memplug: examples/megatron_llama2/train.py, with another model by default.

Start it with a launcher. It takes the arguments of that script.
"""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples/megatron_llama2/train.py"

if __name__ == "__main__":
    sys.path[0] = str(SCRIPT.parent)
    sys.argv[1:1] = ["--model", str(ROOT / "configs/models/mixtral_tiny.yaml")]
    runpy.run_path(str(SCRIPT), run_name="__main__")
