"""Trains a tiny Llama with DeepSpeed on this rank, once for every case, and writes what came of it to a file per rank.

Started by a launcher: `torchrun --nproc-per-node 2 -m tests.training_worker FOLDER CASES`. `CASES` is a JSON object:
name -> {"stage": ..., "memplug": the block or null, "host_budget_gib": one number a rank or absent}. `FOLDER/RANK.json`
gets name -> {"losses", "gathered": parameters that are whole after training, "report"}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

STEPS = 5


def run_case(case: dict[str, Any], rank: int) -> dict[str, Any]:
    """Trains with the case's stage and block; attaches as `memplug.install` does."""
    import memplug
    from tests.hosts import ds_config, make_engine, train_engine

    block = case["memplug"]
    if "host_budget_gib" in case:
        block = {**block, "host_budget_gib": case["host_budget_gib"][rank]}
    memplug.install()
    engine = make_engine(ds_config(case["stage"], block))
    memplug.uninstall()
    losses = train_engine(engine, STEPS, first=rank * 1000)
    return {
        "losses": losses,
        "gathered": [name for name, parameter in engine.module.named_parameters() if parameter.numel()],
        "report": memplug.attach(engine).report(),
    }


def main() -> None:
    """Joins the other ranks and runs all cases."""
    folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    import deepspeed
    import torch.distributed as dist

    # DeepSpeed would first compile a shared-memory all-reduce, which takes half a minute
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    rank = int(os.environ["RANK"])
    results = {name: run_case(case, rank) for name, case in cases.items()}
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
