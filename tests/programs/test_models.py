"""Decoder layers of real models have the same gradients as without memplug, from the first step on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memplug
from tests.support.blocks import assert_clean, assert_same, gradients, tokenwise, twin
from tests.support.causal_models import MODELS, Causal
from tests.support.hosts import QUICK

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.device


EXACT = (0.0, 1.0)
# each batch and each dtype once; long tests run the rest
SOME = [
    pytest.param(1, torch.float32, id="1-float32"),
    pytest.param(3, torch.bfloat16, id="3-bfloat16"),
    pytest.param(1, torch.bfloat16, id="1-bfloat16", marks=pytest.mark.long),
    pytest.param(3, torch.float32, id="3-float32", marks=pytest.mark.long),
]
OTHERS = [
    pytest.param(1, torch.bfloat16, id="1-bfloat16"),
    pytest.param(3, torch.float32, id="3-float32"),
    pytest.param(1, torch.float32, id="1-float32", marks=pytest.mark.long),
    pytest.param(3, torch.bfloat16, id="3-bfloat16", marks=pytest.mark.long),
]


def train_alike(model: Causal, alpha: float, batch: int = 1, steps: int = 2, **settings: Any) -> None:
    """Assert gradients and losses equal to the untouched twin's: to the bit, except where matmuls are split."""
    reference = twin(model)
    executor = tokenwise(model, alpha, **settings)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        tokens = torch.randint(3, 64, (batch, 10 - step), generator=generator)
        losses = []
        for network in (model, reference):
            torch.manual_seed(step)
            loss = network(tokens)
            loss.backward()
            losses.append(loss.item())
            del loss
        assert losses[0] == losses[1]
        assert_same(gradients(model), gradients(reference), exact=alpha in EXACT)
        assert_clean(executor)
    assert executor.flow.forwards == steps * len(model.layers)
    assert executor.divergences == 0
    assert executor.transfer.offloaded_total_bytes > 0


@pytest.mark.parametrize(("batch", "dtype"), SOME)
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("kind", MODELS)
def test_gradients_equal_those_without_memplug(kind: str, alpha: float, batch: int, dtype: torch.dtype) -> None:
    train_alike(Causal(kind, dtype, attention="eager" if kind == "gemma2" else "sdpa"), alpha, batch)


@pytest.mark.parametrize(("batch", "dtype"), OTHERS)
@pytest.mark.parametrize("kind", MODELS)
def test_gradients_equal_those_without_memplug_before_and_after_planning(
    kind: str, batch: int, dtype: torch.dtype
) -> None:
    model = Causal(kind, dtype, attention="eager" if kind == "gemma2" else "sdpa")
    reference = twin(model)
    block = {"enabled": True, "profiler": QUICK, "tokenwise": {"alpha": "auto", "min_offload_bytes": 64}}
    with memplug.attach(model, block) as session:
        for step in range(4):
            tokens = torch.randint(3, 64, (batch, 10), generator=torch.Generator().manual_seed(step))
            losses = [network(tokens) for network in (model, reference)]
            assert losses[0].item() == losses[1].item()
            for loss in losses:
                loss.backward()
            assert_same(gradients(model), gradients(reference), exact=False)
            session.step()
        assert session.report().stage == "stable"
        assert session._attached.executor.divergences == 0


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("kind", ["llama with grouped queries", "qwen3"])
def test_gradients_equal_those_without_memplug_under_eager_attention(kind: str, alpha: float) -> None:
    train_alike(Causal(kind, attention="eager"), alpha, batch=2)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_dropout_is_the_same_in_forward_and_backward(attention: str, alpha: float) -> None:
    train_alike(Causal("llama", attention=attention, attention_dropout=0.3), alpha, batch=2)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_gradients_equal_those_without_memplug_when_host_memory_is_full(alpha: float) -> None:
    train_alike(Causal("llama"), alpha, host_budget_bytes=8192)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_gradients_are_exact_with_tied_embeddings_and_frozen_layers(alpha: float) -> None:
    model = Causal("llama", tie_word_embeddings=True)
    model.layers[1].requires_grad_(False)
    model.layers[2].mlp.requires_grad_(False)
    train_alike(model, alpha)
