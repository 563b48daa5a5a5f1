"""A cache that a later forward reuses, as in segment-level recurrence, leaves gradients as without memplug."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Cache

import memplug
from memplug.errors import ConflictError
from tests.support.blocks import assert_same, gradients
from tests.support.hosts import block, tiny_llama, tokens

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("keeps_nothing")]
alphas = pytest.mark.parametrize("alpha", [0, 1, "auto"])

Found = list[tuple[torch.Tensor, dict[str, torch.Tensor]]]


def segment(model: nn.Module, seed: int, cache: Any = None) -> tuple[torch.Tensor, Any]:
    out = model(input_ids=tokens(seed), labels=tokens(seed), past_key_values=cache)
    return out.loss, out.past_key_values


def detach(cache: Cache) -> None:
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.detach(), layer.values.detach()


def gradients_through_all_segments(model: nn.Module) -> Found:
    found = []
    for step in range(3):
        cache, total = None, 0
        for seed in range(3):
            loss, cache = segment(model, 3 * step + seed, cache)
            total = total + loss
        total.backward()
        found.append((total.detach(), gradients(model)))
    return found


def backward_through_former_segments_each_time(model: nn.Module) -> Found:
    found, cache = [], None
    for seed in range(3):
        loss, cache = segment(model, seed, cache)
        loss.backward(retain_graph=True)
        found.append((loss.detach(), gradients(model)))
    return found


def detached_before_backward(model: nn.Module) -> Found:
    found, cache = [], None
    for seed in range(4):
        loss, cache = segment(model, seed, cache)
        detach(cache)
        loss.backward()
        found.append((loss.detach(), gradients(model)))
    return found


def read_without_gradients(model: nn.Module) -> Found:
    found = []
    for seed in range(3):
        loss, cache = segment(model, seed)
        with torch.no_grad():
            logits = model(input_ids=tokens(seed + 1), past_key_values=cache).logits
        loss.backward()
        found.append((logits, gradients(model)))
    return found


def one_segment_forks(model: nn.Module) -> Found:
    """Run two segments from copies of one cache, whose layers grow by new tensors."""
    loss, cache = segment(model, 0)
    fork = copy.copy(cache)
    fork.layers = [copy.copy(layer) for layer in cache.layers]
    total = loss + segment(model, 1, cache)[0] + segment(model, 2, fork)[0]
    total.backward()
    return [(total.detach(), gradients(model))]


USES = [
    gradients_through_all_segments,
    backward_through_former_segments_each_time,
    detached_before_backward,
    read_without_gradients,
    one_segment_forks,
]
uses = pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)


def assert_alike(found: Found, expected: Found, exact: bool = True) -> None:
    for (value, gradient), (other, others) in zip(found, expected, strict=True):
        assert torch.equal(value, other)
        assert_same(gradient, others, exact)


@alphas
@uses
def test_gradients_through_reused_cache_equal_plain_training(use: Callable[[nn.Module], Found], alpha: Any) -> None:
    expected, model = use(tiny_llama()), tiny_llama()
    with memplug.attach(model, block(alpha=alpha)) as session:
        assert_alike(use(model), expected, exact=alpha != "auto")
        assert session._attached.executor.flow.live == 0


@uses
def test_opaque_regions_keep_cache_tensors_once_their_reuse_has_raised(use: Callable[[nn.Module], Found]) -> None:
    expected, model = use(tiny_llama()), tiny_llama()
    with memplug.attach(model, block()) as session:
        for region in session._attached.regions:
            region.opaque = "the test says so"
        with pytest.raises(ConflictError, match=r"region model\.layers\.0 was(.|\n)*Run the step again"):
            use(model)
        gradients(model)
        assert_alike(use(model), expected)


def test_reusing_a_cache_after_its_backward_raises_only_once() -> None:
    def use(model: nn.Module) -> Found:
        loss, cache = segment(model, 0)
        loss.backward()
        detach(cache)
        loss, _ = segment(model, 1, cache)
        loss.backward()
        return [(loss.detach(), gradients(model))]

    expected, model = use(tiny_llama()), tiny_llama()
    with memplug.attach(model, block()):
        with pytest.raises(ConflictError, match=r"model\.layers\.0 was(.|\n)*Run the step again"):
            use(model)
        gradients(model)
        for _ in range(2):
            assert_alike(use(model), expected)


def test_cache_that_outlives_its_graph_holds_no_frames() -> None:
    model = tiny_llama()
    with memplug.attach(model, block()) as session:
        loss, cache = segment(model, 0)
        loss.backward()
        assert session._attached.executor.flow.live == 0
        loss, cache = segment(model, 0)
        del loss, cache
        assert session._attached.executor.flow.live == 0


def test_detached_cache_can_be_copied() -> None:
    model, plain = tiny_llama(), tiny_llama()
    (_, expected) = segment(plain, 0)
    with memplug.attach(model, block()):
        _, cache = segment(model, 0)
        detach(cache)
        detach(expected)
        for one, other in zip(copy.deepcopy(cache).layers, copy.deepcopy(expected).layers, strict=True):
            assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)
