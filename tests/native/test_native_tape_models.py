"""The native tapes of Hugging Face's models and decoder layers equal those that a dispatch mode records."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from memplug.tokenwise.engine import core as native
from memplug.tokenwise.engine.tape import Form, records_of
from tests.support.compared_tapes import both, compare, compare_layers
from tests.support.native_forward import Run

pytest.importorskip("transformers")

from tests.support.causal_models import MODELS, Causal, mixtral


@pytest.fixture(scope="module")
def core() -> Any:
    return native.core()


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 64, (2, 10), generator=torch.Generator().manual_seed(seed))


def names(tape: Any) -> list[str]:
    return [record.func._schema.name for record in records_of(tape)]


@pytest.mark.parametrize("kind", MODELS)
def test_model_tape_equals_the_reference_and_the_next_forward_follows_it(core: Any, kind: str) -> None:
    model, tokens = Causal(kind, attention="eager" if kind == "gemma2" else "sdpa"), batch()
    run, reference = both(core, lambda: model(tokens))
    assert not run.tape.opaque and len(reference.records) > 100
    compare(run.tape, reference)
    first = Run(core, lambda: model(tokens))
    assert Run(core, lambda: model(tokens), (first.tape,)).follows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        (kind, attention)
        for kind in MODELS
        for attention in ("eager", "sdpa")
        if (kind, attention) != ("gemma2", "sdpa")
    ],
)
def test_decoder_layer_tape_equals_the_reference_tape(core: Any, kind: str, attention: str, dtype: torch.dtype) -> None:
    model = Causal(kind, dtype, attention)
    tapes = compare_layers(core, model.layers, lambda: model(batch()))
    assert len(tapes) == 3
    for tape in tapes:
        assert not tape.opaque and len(names(tape)) > 30
        assert any("scaled_dot_product" in name for name in names(tape)) == (attention == "sdpa")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_tape_of_layer_with_attention_dropout_equals_the_reference_tape(core: Any, attention: str) -> None:
    model = Causal("llama", attention=attention, attention_dropout=0.3)
    for tape in compare_layers(core, model.layers, lambda: model(batch())):
        assert [record.form for record in records_of(tape)].count(Form.FIXED) == 1


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_mixtral_tapes_equal_the_reference_tapes_under_any_routing(core: Any, experts: str) -> None:
    model = mixtral()
    model.set_experts_implementation(experts)
    layers: nn.ModuleList = model.model.layers
    tapes: list[Any] = []
    for seed in range(3):
        call = functools.partial(model, batch(seed), use_cache=False)
        tapes += compare_layers(core, layers, call)
    assert len(tapes) == 3 * len(layers)
    for tape in tapes:
        assert not tape.opaque and "aten::topk" in names(tape)
        assert ("aten::_grouped_mm" in names(tape)) == (experts == "grouped_mm")
