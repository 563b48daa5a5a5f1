"""Ulysses, DeepSpeed's sequence parallelism, in both of its forms.

One is a language model that splits every sequence over the ranks; the other is a Hugging Face Llama with ALST's
attention and data.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention
from torch import nn
from torch.nn import functional

from tests.support.hosts import VOCABULARY, tiny_llama

TOKENS, SEQUENCES, HIDDEN, HEADS = 16, 2, 32, 4


class Attention(nn.Module):
    """Causal attention of [batch, tokens, heads, head size], the local part of Ulysses attention."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


class Block(nn.Module):
    """A decoder layer on a part of each sequence; around attention, heads are scattered and tokens gathered."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.norm, self.norm_after = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.attention = DistributedAttention(Attention(), group, scatter_idx=2, gather_idx=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, HIDDEN // HEADS)).unbind(2)
        x = x + self.out(self.attention(*parts, 0).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_after(x))))


class Ulysses(nn.Module):
    """A language model that splits every sequence over the ranks of a group."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block(group) for _ in range(3))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@functools.cache
def groups(sequence: int) -> Any:
    """Create the groups of ranks that share sequences, as DeepSpeed needs them.

    For the rest of the process, attention of Hugging Face models goes through ALST's.

    Args:
        sequence: how many ranks share a sequence.
    """
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    return UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=llama(),
        core_attn_implementation="sdpa",
        sequence_parallel_size=sequence,
        micro_batch_size=SEQUENCES,
    )


def llama() -> nn.Module:
    """Return a Llama whose attention is replaced by ALST's."""
    return tiny_llama(attn_implementation="sdpa")


class _Samples:
    """The samples of one data-parallel rank; ALST's adapter splits them among the ranks that share sequences."""

    def __init__(self, seed: int, count: int) -> None:
        self.seed, self.count = seed, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.count):
            tokens = torch.randint(0, VOCABULARY, (SEQUENCES, TOKENS), generator=generator)
            positions = torch.arange(TOKENS).repeat(SEQUENCES, 1)
            yield {"input_ids": tokens, "labels": tokens.clone(), "position_ids": positions}


def batches(mpu: Any, count: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this rank's parts of the Llama's micro-batches."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter

    size = mpu.get_sequence_parallel_world_size()
    samples = _Samples(dist.get_rank(), math.ceil(count / size))
    group, rank = mpu.get_sequence_parallel_group(), mpu.get_sequence_parallel_rank()
    return iter(UlyssesSPDataLoaderAdapter(samples, rank, group, size, "cpu"))


def loss_of(engine: Any, batch: dict[str, torch.Tensor], mpu: Any) -> torch.Tensor:
    """Return the mean loss of a micro-batch's tokens, over all ranks that share its sequences."""
    labels = batch["shift_labels"].contiguous()  # on the CPU the adapter returns a part of a larger tensor
    logits = engine(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    own = engine.module.loss_function(logits=logits, labels=None, shift_labels=labels, vocab_size=VOCABULARY)
    count = (labels != -100).sum()
    total, group = count.clone(), mpu.get_sequence_parallel_group()
    dist.all_reduce(total, group=group)
    # the backward of the recipe's all_gather is a scatter, which gloo lacks in groups of only some ranks
    return dist.nn.functional.all_reduce(own * count, group=group) / total
