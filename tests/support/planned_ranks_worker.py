"""Train a Llama with DeepSpeed on this rank by a DeepSpeed JSON, without its "memplug" block, with it, and again.

Started by a launcher: `torchrun --nproc-per-node 2 -m tests.support.planned_ranks_worker FOLDER DS_JSON MODEL SEQ_LEN`.
`MODEL` is the file of a model's shape. `FOLDER/RANK.json` gets "without", "with" and "again", each with {"losses",
"report": memplug's, "violations": how often the simulator saw a wrong order}.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

STEPS = 2


def train(settings: dict[str, Any], model: str, seq_len: int, rank: int) -> dict[str, Any]:
    """Train by DeepSpeed's settings; return losses of all micro-batches, the report and the simulator's violations.

    memplug attaches through `memplug.install`.
    """
    import deepspeed

    import memplug
    from memplug.predict.estimator.shapes import Shape
    from memplug.predict.estimator.workload import Workload
    from tests.cudasim import device

    before = device.violations()
    shape = Shape.read(Path(model))
    job = Workload(shape=shape, layers=shape.layers, seq_len=seq_len, dtype="fp32")  # the engine converts it to bf16
    torch.manual_seed(0)
    partitioned = settings["zero_optimization"]["stage"] == 3
    with deepspeed.zero.Init(config_dict_or_path=settings) if partitioned else contextlib.nullcontext():
        llama = job.make_model()
    memplug.install()
    try:
        engine = deepspeed.initialize(model=llama, model_parameters=llama.parameters(), config=settings)[0]
    finally:
        memplug.uninstall()
    session = memplug.attach(engine)
    size, losses = (settings["train_micro_batch_size_per_gpu"], seq_len), []
    for number in range(STEPS * engine.gradient_accumulation_steps()):
        generator = torch.Generator().manual_seed(1000 * rank + number)
        ids = torch.randint(0, shape.fields["vocab_size"], size, generator=generator).to(engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    report = session.report().as_dict()
    session.detach()
    engine.destroy()
    return {"losses": losses, "report": report, "violations": device.violations() - before}


def main() -> None:
    """Join the other ranks; train without the block, then with it, then with it again."""
    folder, settings = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    import deepspeed
    import torch.distributed as dist

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else DeepSpeed compiles it first
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed("nccl")
    plain = {key: value for key, value in settings.items() if key != "memplug"}
    results = {
        name: train(each, sys.argv[3], int(sys.argv[4]), dist.get_rank())
        for name, each in (("without", plain), ("with", settings), ("again", settings))
    }
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(results, default=str))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
