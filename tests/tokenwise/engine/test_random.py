"""Random numbers in a region: the recompute pass repeats the forward's draws, without an effect elsewhere."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.blocks import ALPHAS, Drops, DropsAttention, Layer, Stack, alphas, tokenwise, train_alike

pytestmark = pytest.mark.device


class DropsInPlace(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.empty_like(x).bernoulli_(0.5)
        noise = torch.randn_like(x)
        return (
            x
            + self.out(F.dropout(self.inner(x), 0.2, inplace=True).tanh()) * mask
            + (x * noise).sin()
            + torch.rand(1) * x
        )


class Samples(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        row = torch.multinomial(y.reshape(-1, 32).softmax(-1).detach(), 3)
        return x + self.out(y * torch.gather(y.reshape(-1, 32), 1, row).sum().sigmoid() * torch.rand_like(y))


RANDOM = [Drops, DropsAttention, DropsInPlace, Samples]


@alphas
@pytest.mark.parametrize("block", RANDOM, ids=lambda block: block.__name__)
def test_recompute_pass_draws_the_numbers_of_the_forward(block: Callable[[], nn.Module], alpha: float) -> None:
    train_alike(block, alpha)


@alphas
@pytest.mark.parametrize("block", RANDOM, ids=lambda block: block.__name__)
def test_backward_restores_the_random_generator(block: Callable[[], nn.Module], alpha: float) -> None:
    torch.manual_seed(0)
    model = Stack(2, block)
    tokenwise(model, alpha)
    loss = model(torch.randn(2, 6, 16))
    state = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), state)


class DrawsBehindCapturedAttention(torch.nn.Module):
    """A layer that draws dropout after a captured random operator; recompute passes must skip that operator's draws."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended = torch.ops.flash_attn._random_forward(x, 0.3)
        return x * F.dropout(x @ self.weight, 0.5).sigmoid() + attended


def test_captured_random_operator_still_advances_the_generator(
    flash_operators: collections.Counter[str],
) -> None:
    for alpha in ALPHAS:
        train_alike(DrawsBehindCapturedAttention, alpha)


@pytest.fixture(scope="module")
def flash_operators() -> Iterator[collections.Counter[str]]:
    """Register operators like flash-attn's, and yield the count of their calls."""
    calls: collections.Counter[str] = collections.Counter()
    with torch.library._scoped_library("flash_attn", "FRAGMENT") as library:
        library.define(
            "_random_forward(Tensor x, float dropout_p) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,)
        )

        library.define("_untagged_forward(Tensor x, float dropout_p) -> Tensor")

        def forward(x: torch.Tensor, dropout_p: float) -> torch.Tensor:
            calls["forward"] += 1
            return torch.rand_like(x) if dropout_p else x.sin()

        for name in ("_random_forward", "_untagged_forward"):
            library.impl(name, forward, "CPU")
            library.impl(name, forward, "CUDA")
        yield calls


class DrawsUntagged(DrawsBehindCapturedAttention):
    """Attention like flash-attn's: its operator draws, but has no tag that says so, and backward reads the result."""

    dropout = 0.3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended = torch.ops.flash_attn._untagged_forward(x.detach(), self.dropout)
        return x * F.dropout(x @ self.weight, 0.5).sigmoid() * attended


class UntaggedWithoutDropout(DrawsUntagged):
    """The same layer without attention dropout, so its operator draws nothing."""

    dropout = 0.0


@pytest.mark.parametrize("layer", [DrawsUntagged, UntaggedWithoutDropout])
def test_flash_attention_repeats_its_dropout_on_a_full_host(
    layer: type[nn.Module], flash_operators: collections.Counter[str]
) -> None:
    flash_operators.clear()
    train_alike(layer, 1.0, host_budget_bytes=1)
    assert flash_operators["forward"] == 2 * 3 * (1 + 2), (
        "two steps, three layers: once in the reference, twice in the model"
    )


class SavesAttentionInput(DrawsBehindCapturedAttention):
    """A layer whose backward asks for the input of the captured operator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight
        return y.sin() + torch.ops.flash_attn._random_forward(y.detach(), 0.3)


@pytest.mark.parametrize("alpha", [0.0, *ALPHAS])
def test_input_of_a_captured_random_operator_is_recomputed(
    alpha: float, flash_operators: collections.Counter[str]
) -> None:
    train_alike(SavesAttentionInput, alpha)
