"""Train a tiny model with DeepSpeed on this rank, without memplug and with its arena, and write the results.

Started by a launcher: `torchrun --nproc-per-node 2 -m tests.support.arena_worker FOLDER CASES`. `CASES` is a JSON
object: name -> {"stage": ZeRO's stage, "model": "llama" or "mixtral", "memplug": the block, "steps": how many,
"validate": steps between validations}.

`FOLDER/RANK.json` gets name -> {"without", "with": losses of all steps and validations, "report": of memplug}.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

BUCKET = 50_000  # elements; DeepSpeed's default suits models that this machine cannot hold


def run(case: dict[str, Any], block: dict[str, Any] | None, rank: int) -> tuple[list[float], dict[str, Any]]:
    """Train one case, and return its losses and memplug's report, which is empty without a block."""
    import torch

    import memplug
    from tests.support import serving
    from tests.support.hosts import ds_config, make_engine

    torch.manual_seed(0)
    zero = {"stage": case["stage"], "stage3_param_persistence_threshold": 0}
    zero |= {"reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
    config = ds_config(case["stage"], block, zero_optimization=zero, gradient_accumulation_steps=2)
    engine = make_engine(config, getattr(serving, case["model"])())
    session = memplug.attach(engine) if block else None
    tokens, losses = torch.Generator().manual_seed(rank), []
    for step in range(case["steps"]):
        for _ in range(2):
            batch = torch.randint(0, 64, (2, 16), generator=tokens)
            loss = engine(input_ids=batch, labels=batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        if step % case["validate"] == case["validate"] - 1:
            with torch.no_grad():
                losses.append(engine(input_ids=batch, labels=batch).loss.item())
    report = session.report().as_dict() if session else {}
    if session:
        session.detach()
    engine.destroy()
    return losses, report


def main() -> None:
    """Join the other ranks and run all cases."""
    folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    import deepspeed
    import torch.distributed as dist

    # DeepSpeed would first compile a shared-memory all-reduce, which takes half a minute
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    rank = int(os.environ["RANK"])
    results = {}
    for name, case in cases.items():
        without, _ = run(case, None, rank)
        served, report = run(case, case["memplug"], rank)
        results[name] = {"without": without, "with": served, "report": report}
    (folder / f"{rank}.json").write_text(json.dumps(results))
    gc.collect()  # no backend thread may release a tensor while Python ends
    dist.barrier()
    dist.destroy_process_group()
    # DeepSpeed keeps the process groups of all these engines, and the groups' threads may fail while Python ends; the
    # recipe's runs show that a process with one engine ends well
    os._exit(0)


if __name__ == "__main__":
    main()
