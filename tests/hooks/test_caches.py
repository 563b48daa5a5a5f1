"""Layers with key-value caches train as without memplug, and regions release their cache's tensors like their own."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache, T5Config, T5ForConditionalGeneration

import memplug
from memplug.errors import InPlaceError
from tests.support.blocks import alphas, assert_same, gradients
from tests.support.hosts import block, tiny_llama, tokens

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("keeps_nothing")]

REGIONS = {"layers": "auto", "attention": ["model.layers.*.self_attn"]}
regions = pytest.mark.parametrize("regions", REGIONS.values(), ids=list(REGIONS))


class Prefixed(nn.Module):
    """Prefix tuning: each layer's cache begins with trained keys and values."""

    def __init__(self, **fields: Any):
        super().__init__()
        self.model = tiny_llama(attn_implementation="eager", **fields)
        self.prefix = nn.Parameter(torch.randn(3, 2, 2, 2, 5, 8))

    def forward(self, x: torch.Tensor) -> Any:
        cache = DynamicCache(config=self.model.config)
        for layer, (keys, values) in enumerate(self.prefix * 2):
            cache.update(keys, values, layer)
        return self.model(input_ids=x, labels=x, past_key_values=cache)


def losses_and_gradients(model: nn.Module, session: Any = None) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    found = []
    for seed in range(3):
        loss = model(tokens(seed)).loss
        loss.backward()
        found.append((loss.detach(), gradients(model)))
        if session is not None:
            session.step()
    return found


@alphas
@pytest.mark.parametrize("kind", ["causal", "encoder-decoder"])
def test_peft_prefix_tuning_trains_as_without_memplug(kind: str, alpha: Any) -> None:
    peft = pytest.importorskip("peft")

    class Tuned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
            t5 = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0))
            model, task = (tiny_llama(), "CAUSAL_LM") if kind == "causal" else (t5, "SEQ_2_SEQ_LM")
            self.model = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=4))

        def forward(self, x: torch.Tensor) -> Any:
            return self.model(input_ids=x, labels=x)

    plain, model = losses_and_gradients(Tuned()), Tuned()
    with memplug.attach(model, block(alpha=alpha)) as session:
        for (loss, gradient), (expected, others) in zip(losses_and_gradients(model, session), plain, strict=True):
            assert torch.equal(loss, expected)
            assert_same(gradient, others, exact=alpha in (0, 1))


def opaque(session: Any) -> None:
    for region in session._attached.regions:
        region.opaque = "the test says so"


@alphas
@regions
@pytest.mark.parametrize("is_opaque", [False, True])
def test_trained_prefix_gets_the_same_gradients_as_without_memplug(alpha: Any, regions: Any, is_opaque: bool) -> None:
    plain, model = losses_and_gradients(Prefixed()), Prefixed()
    assert all(gradient["prefix"].abs().max() > 0 for _, gradient in plain)
    with memplug.attach(
        model, block(alpha=alpha, regions=regions if regions == "auto" else [f"model.{regions[0]}"])
    ) as on:
        if is_opaque:
            opaque(on)
        for (loss, gradient), (expected, others) in zip(losses_and_gradients(model, on), plain, strict=True):
            assert torch.equal(loss, expected)
            assert_same(gradient, others, exact=alpha in (0, 1))


@alphas
def test_each_layer_updates_the_empty_cache_once(alpha: Any) -> None:
    # without a cache, keys would not be contiguous, and a matmul might round differently
    seen = []

    class Seeing(DynamicCache):
        def update(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(self.get_seq_length(args[2]))
            return super().update(*args, **kwargs)

    model, x = tiny_llama(), tokens()
    with memplug.attach(model, block(alpha=alpha)):
        model(input_ids=x, labels=x, past_key_values=Seeing()).loss.backward()
        assert seen == [0, 0, 0]


def test_returned_cache_keeps_its_length_but_no_tensors() -> None:
    model, x = tiny_llama(), tokens()
    with memplug.attach(model, block()):
        out = model(input_ids=x, labels=x)
        cache = out.past_key_values
        assert [cache.get_seq_length(layer) for layer in range(3)] == [x.shape[1]] * 3
        assert not any(isinstance(value, torch.Tensor) for layer in cache.layers for value in vars(layer).values())
        cache.reset()
        assert cache.get_seq_length() == 0
        assert_same_training(model, x, cache)


def assert_same_training(model: nn.Module, x: torch.Tensor, cache: Any, plain_cache: Any = None) -> None:
    plain = tiny_llama()
    expected = plain(input_ids=x, labels=x, past_key_values=plain_cache).loss
    expected.backward()
    loss = model(input_ids=x, labels=x, past_key_values=cache).loss
    loss.backward()
    assert torch.equal(loss, expected)
    assert_same(gradients(model), gradients(plain))


@pytest.mark.parametrize("is_opaque", [False, True])
def test_layers_attend_to_a_cache_filled_without_gradients(is_opaque: bool) -> None:
    model, x = tiny_llama(), tokens()
    with memplug.attach(model, block()) as session:
        if is_opaque:
            opaque(session)
        with torch.no_grad():
            cache = model(input_ids=x, use_cache=True).past_key_values
        assert_same_training(model, x, cache, copy.deepcopy(cache))


@pytest.mark.parametrize("is_opaque", [False, True])
def test_static_cache_is_written_as_without_memplug(is_opaque: bool) -> None:
    def prefilled(model: nn.Module) -> StaticCache:
        cache = StaticCache(model.config, max_cache_len=32)
        with torch.no_grad():
            model(input_ids=tokens(1), past_key_values=cache)
        return cache

    model, plain, x = tiny_llama(), tiny_llama(), tokens()
    theirs = prefilled(plain)
    with memplug.attach(model, block()) as session:
        if is_opaque:
            opaque(session)
        cache = prefilled(model)
        assert_same_training(model, x, cache, theirs)
        for one, other in zip(cache.layers, prefilled(plain).layers, strict=True):
            assert torch.equal(one.keys[:, :, :12], other.keys[:, :, :12])


@pytest.mark.parametrize("ending", ["backward", "failed", "dropped"])
@pytest.mark.parametrize("is_opaque", [False, True])
def test_static_cache_does_not_keep_model_or_session_alive(is_opaque: bool, ending: str) -> None:
    def step() -> list[weakref.ref[Any]]:
        model, x = tiny_llama(), tokens()
        cache = StaticCache(model.config, max_cache_len=48)
        with memplug.attach(model, block()) as session:
            if is_opaque:
                opaque(session)
            with torch.no_grad():
                model(input_ids=x, past_key_values=cache)
            loss = model(input_ids=x, labels=x, past_key_values=cache).loss
            if ending == "failed":
                with torch.no_grad():
                    model(input_ids=x, past_key_values=cache)
            with contextlib.suppress(InPlaceError):
                if ending != "dropped":
                    loss.backward()
        return [weakref.ref(each) for each in (model, session, cache.layers[0].keys)]

    left = step()
    gc.collect()
    assert [each() for each in left] == [None] * 3


def test_writing_to_a_cache_before_backward_raises_with_the_region_name() -> None:
    model, x = LlamaForCausalLM(LlamaConfig(**{**tiny_llama().config.to_dict(), "num_key_value_heads": 4})), tokens()
    cache = StaticCache(model.config, max_cache_len=48)
    with memplug.attach(model, block()):
        with torch.no_grad():
            model(input_ids=x, past_key_values=cache)
        loss = model(input_ids=x, labels=x, past_key_values=cache).loss
        with torch.no_grad():
            model(input_ids=x, past_key_values=cache)
        with pytest.raises(RuntimeError, match=r"region model\.layers\.2: .* by an inplace operation") as error:
            loss.backward()
        assert isinstance(error.value, InPlaceError) and "key-value cache" in error.value.advice
