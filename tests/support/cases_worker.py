"""What workers of cases have in common: a rank joins the other, runs all cases and writes what came of them."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run_all(run: Callable[[Any, int], Any]) -> None:
    """Runs `run(case, rank)` for each of the command line FOLDER CASES into `FOLDER/RANK.json`; ends the process."""
    import deepspeed
    import torch.distributed as dist

    folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    # DeepSpeed would first compile a shared-memory all-reduce, which takes half a minute
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    rank = int(os.environ["RANK"])
    results = {name: run(case, rank) for name, case in cases.items()}
    (folder / f"{rank}.json").write_text(json.dumps(results))
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # DeepSpeed keeps the groups of all these engines, whose threads may trip over the end of Python
