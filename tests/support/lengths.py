"""Trainings of a small Llama whose inputs change in size from step to step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

Draw = Callable[["np.random.Generator | Largest"], list[tuple[int, int]]]

LONGEST_AT = 8


class Largest:
    """A generator of random numbers that always draws the largest."""

    def integers(self, least: int, end: int) -> int:
        return end - 1

    def choice(self, values: list[int]) -> int:
        return max(values)

    def lognormal(self, mean: float, sigma: float) -> float:
        return float("inf")


def llama(attention: str = "eager") -> LlamaForCausalLM:
    """Return a Llama of three layers, the same each time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=3,
        vocab_size=128,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config)


def train(model: nn.Module, draw: Draw, steps: int, after: Callable[[], object] = lambda: None) -> Iterator[float]:
    """Train, and yield the loss of each step.

    Args:
        model: a causal language model.
        draw: returns (batch, tokens) of each micro-batch of a step; step `LONGEST_AT` has the largest that it can draw.
        steps: number of steps.
        after: called after each step.
    """
    torch.manual_seed(1)
    random = np.random.default_rng(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        total = 0.0
        for shape in draw(random) if step != LONGEST_AT else draw(Largest()):
            tokens = torch.randint(0, 128, shape)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        after()
        yield total


def one_length(random: np.random.Generator | Largest) -> list[tuple[int, int]]:
    return [(2, int(random.integers(2, 97)))]


def buckets_of_lengths(random: np.random.Generator | Largest) -> list[tuple[int, int]]:
    return [(2, int(random.choice([16, 32, 64, 96])))]


def batch_and_length(random: np.random.Generator | Largest) -> list[tuple[int, int]]:
    return [(int(random.integers(2, 5)), int(random.integers(8, 97)))]


def any_batch(random: np.random.Generator | Largest) -> list[tuple[int, int]]:
    return [(int(random.integers(1, 5)), int(random.integers(8, 97)))]


def micro_batches(random: np.random.Generator | Largest) -> list[tuple[int, int]]:
    return [(1, int(random.integers(8, 97))) for _ in range(3)]


def normal(random: np.random.Generator | Largest) -> list[tuple[int, int]]:
    return [(1, int(np.clip(random.lognormal(3.5, 0.6), 4, 160)))]
