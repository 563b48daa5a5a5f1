"""Train a tiny Llama by tuned DeepSpeed JSONs on this rank, with memplug if a JSON has its block.

Started by a launcher: `torchrun --nproc-per-node 2 -m tests.support.tune_worker FOLDER CASES`. `CASES` is a JSON
object: name -> the DeepSpeed JSON. `FOLDER/RANK.json` gets name -> the results of `cases_worker.train_engine`:
{"losses": of each micro-batch, "digest": of the weights at the end, "report": memplug's, ...}.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.support.cases_worker import run_all, train_engine

STEPS = 8


def train(case: dict[str, Any], rank: int) -> dict[str, Any]:
    """Run a case."""
    from tests.support.hosts import make_engine, tiny_llama

    engine = make_engine(case, tiny_llama())
    accumulation, sequences = engine.gradient_accumulation_steps(), engine.train_micro_batch_size_per_gpu()

    def loss_of(number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * rank + number % 2)
        tokens = torch.randint(0, 64, (sequences, 16), generator=generator)
        return engine(input_ids=tokens, labels=tokens).loss

    return train_engine(engine, loss_of, STEPS * accumulation, with_memplug="memplug" in case)


def main() -> None:
    """Join the other rank and run all cases."""
    run_all(train)


if __name__ == "__main__":
    main()
