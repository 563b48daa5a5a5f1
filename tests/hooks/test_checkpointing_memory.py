"""A step holds no more device memory than under the checkpointing that memplug replaces."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import memplug
from tests.support.hosts import block

pytestmark = pytest.mark.gpu
LAYERS, BATCH, LENGTH = 6, 4, 256


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, **sizes)).cuda().train()


def closures(model: LlamaForCausalLM) -> None:
    """Have each layer called inside of a reentrant checkpoint, as old code for Hugging Face models does."""
    for layer in model.model.layers:
        own = layer.__class__.__call__

        def call(self: nn.Module, x: torch.Tensor, *args: object, own=own, **kwargs: object) -> torch.Tensor:
            return checkpoint(lambda y: own(self, y, *args, **kwargs), x, use_reentrant=True)

        layer.__class__ = type(layer.__class__.__name__, (layer.__class__,), {"__call__": call})
    model.enable_input_require_grads()


def flag(model: LlamaForCausalLM, reentrant: bool) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()


WAYS = {
    "flag": lambda model: flag(model, False),
    "reentrant flag": lambda model: flag(model, True),
    "reentrant closures": closures,
}


def step(model: nn.Module) -> None:
    x = torch.randint(0, 64, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0)).cuda()
    model(input_ids=x, labels=x, use_cache=False).loss.backward()
    model.zero_grad()


def peak_bytes(model: nn.Module) -> int:
    """Return by how much a step's peak exceeds the memory in use before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(model)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("way", WAYS)
def test_step_holds_no_more_than_under_the_scripts_checkpointing(way: str, alpha: float) -> None:
    peaks = []
    for by_memplug in (False, True):
        model = llama()
        WAYS[way](model)
        if not by_memplug:
            for _ in range(4):
                step(model)
            peaks.append(peak_bytes(model))
            continue
        config = {**block(alpha=alpha), "arena": {"enabled": False}, "swap": {"enabled": False}}
        with memplug.attach(model, config) as session:
            for _ in range(4):
                step(model)
                session.step()
            peaks.append(peak_bytes(model))
            assert session.report().tokenwise.offloaded_bytes > 0
    own, ours = peaks
    assert ours <= own
