"""Train a tiny model with DeepSpeed on this rank, offloaded to the CPU or with Ulysses attention, and write losses.

Started by a launcher: `torchrun --nproc-per-node N -m tests.support.offload_worker FOLDER CASES`. `CASES` is a JSON
object: name -> {"zero": DeepSpeed's section "zero_optimization", "model": "llama", "ulysses" or "alst", "memplug": the
block or null}. Optional keys:

* "sequence": how many ranks share a sequence, given for all cases or for none; by default all ranks share one;
* "short_of_host_memory": [rank, step], see `run_short`.

`FOLDER/RANK.json` gets name -> {"losses": of each step, "digest": of the weights at the end, "report": memplug's,
"shares": for each step the share of rows that memplug swapped, "offloaded": two booleans, whether the optimizer's state
and the weights are on the CPU, "digests": with "sequence", a digest of all gradients in each step}.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.support import ulysses
from tests.support.cases_worker import run_all, train_engine

STEPS = 10


def train(case: dict[str, Any], rank: int) -> dict[str, Any]:
    """Run a case."""
    from tests.support.hosts import ds_config, make_engine, tiny_llama

    mpu = ulysses.groups(case["sequence"]) if "sequence" in case else None
    torch.manual_seed(0)
    group = mpu.get_sequence_parallel_group() if mpu is not None else dist.group.WORLD
    buckets = {"reduce_bucket_size": 50_000, "allgather_bucket_size": 50_000, "stage3_param_persistence_threshold": 0}
    zero = {**buckets, **case["zero"]}
    config = ds_config(zero["stage"], case["memplug"], zero_optimization=zero, zero_force_ds_cpu_optimizer=False)
    models = {"llama": tiny_llama, "ulysses": lambda: ulysses.Ulysses(group), "alst": ulysses.llama}
    engine = make_engine(config, models[case["model"]](), mpu=mpu)
    batches = ulysses.batches(mpu, STEPS) if case["model"] == "alst" else None

    def loss_of(step: int) -> torch.Tensor:
        if batches is not None:
            return ulysses.loss_of(engine, next(batches), mpu)
        if case["model"] == "ulysses":
            return engine(*_part(step, group))
        generator = torch.Generator().manual_seed(1000 * rank + step % 2)
        tokens = torch.randint(0, 64, (2, ulysses.TOKENS + 1), generator=generator)
        return engine(input_ids=tokens, labels=tokens).loss

    offloaded = [_has(engine, "cpu_offload") or _has(engine, "offload_optimizer"), _has(engine, "offload_param")]
    short, gradients = case.get("short_of_host_memory"), "sequence" in case
    found = train_engine(engine, loss_of, STEPS, bool(case["memplug"]), short, gradients)
    return {"offloaded": offloaded, **found}


def _part(step: int, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of its group's tokens and labels; two batches take turns."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    generator = torch.Generator().manual_seed(1000 * (dist.get_rank() // size) + step % 2)
    tokens = torch.randint(0, 64, (ulysses.SEQUENCES, ulysses.TOKENS + 1), generator=generator)
    part = slice(rank * ulysses.TOKENS // size, (rank + 1) * ulysses.TOKENS // size)
    return tokens[:, :-1][:, part], tokens[:, 1:][:, part]


def _has(engine: Any, name: str) -> bool:
    return bool(getattr(engine.optimizer, name, False))  # the optimizers of ZeRO's stages use different names


def main() -> None:
    """Join the other rank and run all cases."""
    run_all(train)


if __name__ == "__main__":
    main()
