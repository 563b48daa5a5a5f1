"""Trains a tiny model with DeepSpeed on this rank, offloaded to the CPU or with Ulysses attention, and writes losses.

Started by a launcher: `torchrun --nproc-per-node 2 -m tests.support.offload_worker FOLDER CASES`. `CASES` is a JSON
object: name -> {"zero": of DeepSpeed's configuration, "model": "llama" or "ulysses", "memplug": the block or null}.

`FOLDER/RANK.json` gets name -> {"losses": of each step, "digest": of the weights at the end, "report": of memplug,
"offloaded": whether the engine has the optimizer's state, and the weights, on the CPU}.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention
from torch import nn
from torch.nn import functional

from tests.support.cases_worker import run_all, train_engine

STEPS, TOKENS, HIDDEN, HEADS = 10, 16, 32, 4


class Attention(nn.Module):
    """Causal, of [batch, tokens, heads, head size], as the local part of Ulysses attention."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


class Block(nn.Module):
    """A decoder layer that has its part of each sequence; heads and tokens change places around attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_after = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.attention = DistributedAttention(Attention(), dist.group.WORLD, scatter_idx=2, gather_idx=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, HIDDEN // HEADS)).unbind(2)
        x = x + self.out(self.attention(*parts, 0).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_after(x))))


class Ulysses(nn.Module):
    """A language model of which each rank has half of every sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(HIDDEN, 64)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def train(case: dict[str, Any], rank: int) -> dict[str, Any]:
    """Runs a case."""
    from tests.support.hosts import ds_config, make_engine, tiny_llama

    torch.manual_seed(0)
    ulysses = case["model"] == "ulysses"
    buckets = {"reduce_bucket_size": 50_000, "allgather_bucket_size": 50_000, "stage3_param_persistence_threshold": 0}
    zero = {**buckets, **case["zero"]}
    config = ds_config(zero["stage"], case["memplug"], zero_optimization=zero, zero_force_ds_cpu_optimizer=False)
    engine = make_engine(config, Ulysses() if ulysses else tiny_llama())

    def loss_of(step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step % 2 if ulysses else 1000 * rank + step % 2)
        tokens = torch.randint(0, 64, (2, TOKENS + 1), generator=generator)
        if ulysses:  # this rank's half of the sequence
            half = slice(rank * TOKENS // 2, (rank + 1) * TOKENS // 2)
            return engine(tokens[:, :-1][:, half], tokens[:, 1:][:, half])
        return engine(input_ids=tokens, labels=tokens).loss

    offloaded = [_has(engine, "cpu_offload") or _has(engine, "offload_optimizer"), _has(engine, "offload_param")]
    return {"offloaded": offloaded, **train_engine(engine, loss_of, STEPS, with_memplug=bool(case["memplug"]))}


def _has(engine: Any, name: str) -> bool:
    return bool(getattr(engine.optimizer, name, False))  # of ZeRO's optimizers, named differently by stage


def main() -> None:
    """Joins the other rank and runs all cases."""
    run_all(train)


if __name__ == "__main__":
    main()
