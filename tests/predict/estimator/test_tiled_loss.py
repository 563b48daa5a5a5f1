"""A tiled loss and its gradients equal those of the model's own loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memplug.predict.estimator.tiled_loss import tile_loss
from tests.support import recipes

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
@pytest.mark.parametrize("tiles", [2, 7])  # 62 tokens: two equal tiles; seven tiles, the last one shorter
def test_tiled_loss_and_gradients_match_the_whole_loss(family: str, tiles: int) -> None:
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


class _Operators(TorchDispatchMode):
    """A mode that records the operators of forward and backward, with the sizes of their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func, [tuple(one.shape) for one in args if isinstance(one, torch.Tensor)]))
        return func(*args, **(kwargs or {}))


def test_tiled_loss_runs_the_same_operators_as_the_recipes_own() -> None:
    ids, each = torch.randint(0, SIZES["vocab_size"], (2, 32)), []
    for tile in (tile_loss, recipes.tiled_loss.tile_loss):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, use_cache=False))
        with _Operators() as operators:
            out = tile(model, 3)(input_ids=ids, labels=ids)
            (out if isinstance(out, torch.Tensor) else out.loss).backward()
        each.append(operators.seen)
    assert each[0] == each[1]
