"""Trains a tiny Llama by a tuned DeepSpeed JSON on this rank, with its memplug block and without.

Started by a launcher: `torchrun --nproc-per-node 2 -m tests.support.tune_worker FOLDER CASES`. `CASES` is a JSON
object: name -> the DeepSpeed JSON. `FOLDER/RANK.json` gets name -> {"losses": of each micro-batch, "digest": of the
weights at the end, "report": of memplug}.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.support.cases_worker import run_all
from tests.support.offload_worker import digest

STEPS = 8


def train(case: dict[str, Any], rank: int) -> dict[str, Any]:
    """Runs a case."""
    import memplug
    from tests.support.hosts import make_engine, tiny_llama

    engine = make_engine(case, tiny_llama())
    session = memplug.attach(engine) if "memplug" in case else None
    losses = []
    for step in range(STEPS * engine.gradient_accumulation_steps()):
        generator = torch.Generator().manual_seed(1000 * rank + step % 2)
        tokens = torch.randint(0, 64, (engine.train_micro_batch_size_per_gpu(), 16), generator=generator)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    result = {
        "losses": losses,
        "digest": digest(engine.module),
        "report": session.report() if session else {},
    }
    if session:
        session.detach()
    engine.destroy()
    return result


def main() -> None:
    """Joins the other rank and runs all cases."""
    run_all(train)


if __name__ == "__main__":
    main()
