"""A loss in parts is the model's own loss, and so are its gradients."""

from __future__ import annotations

import pytest
import torch

from memplug.estimator.tiled_loss import tile_loss

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.parametrize("tiles", [2, 7])  # of 62 tokens: parts that are alike, and a shorter last one
def test_loss_and_gradients_are_those_of_all_tokens_at_once(family: str, tiles: int) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, use_cache=False)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    ids = torch.randint(0, SIZES["vocab_size"], (2, 32))
    labels = torch.where(ids < 8, -100, ids)
    whole = model(input_ids=ids, labels=labels).loss
    wanted = torch.autograd.grad(whole, list(model.parameters()))
    assert tile_loss(model, 1) is model and "forward" not in vars(model)
    parts = tile_loss(model, tiles)(input_ids=ids, labels=labels)
    found = torch.autograd.grad(parts, list(model.parameters()))
    torch.testing.assert_close(parts, whole)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)
