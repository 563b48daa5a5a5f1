"""FlexAttention inside of regions: gradients hold, and a model that has compiled it is told that it is not there."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention as flex

import memplug
from tests.support.blocks import LAYERS, assert_same, gradients, twin

WIDTH, HEADS, TOKENS, STEPS = 32, 4, 128, 3


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch refuses its backward there, for want of a fused kernel."""
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    with contextlib.ExitStack() as stack:
        stack.callback(torch.compiler.reset)
        yield


def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """A mask."""
    return query >= key


class Attends(nn.Module):
    """With a residual."""

    attention = staticmethod(flex.flex_attention)

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mask = flex.create_block_mask(causal, None, None, TOKENS, TOKENS, device="cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2).contiguous() for y in self.qkv(x).chunk(3, -1))
        attended = self.attention(q, k, v, block_mask=self.mask)
        return x + self.out(attended.transpose(1, 2).flatten(-2))


class Model(nn.Module):
    """Layers in a row and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attends() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def trained(alpha: float) -> dict[str, Any]:
    """The report of a training whose gradients are those without memplug."""
    torch.manual_seed(0)
    model = Model()
    reference = twin(model)
    tokenwise = {"regions": LAYERS, "alpha": alpha, "min_offload_bytes": 256}
    block = {"enabled": True, "plan_dir": False, "arena": {"enabled": False}, "tokenwise": tokenwise}
    with memplug.attach(model, block) as session:
        for x in torch.randn(STEPS, 2, TOKENS, WIDTH):
            reference(x * 1.0).backward()
            model(x * 1.0).backward()
            assert_same(gradients(model), gradients(reference))
            session.step()
        return session.report()


def warnings(caplog: pytest.LogCaptureFixture) -> int:
    """How often memplug told of it."""
    return sum("FlexAttention is not compiled" in record.message for record in caplog.records)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_a_model_that_has_compiled_it_is_told_once_and_gradients_hold(
    alpha: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = torch.compile(flex.flex_attention, backend="aot_eager")
    monkeypatch.setattr(Attends, "attention", staticmethod(compiled))
    with caplog.at_level(logging.WARNING, "memplug"):
        assert trained(alpha)["opaque_regions"] == 3
    assert warnings(caplog) == 1


def test_of_a_call_that_is_not_compiled_torch_alone_tells(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "memplug"):
        trained(0.0)
    assert warnings(caplog) == 0


def test_the_operator_is_as_before_once_the_session_is_detached() -> None:
    before = flex.flex_attention_hop
    with memplug.attach(Model(), {"enabled": True, "plan_dir": False, "tokenwise": {"regions": LAYERS}}):
        assert flex.flex_attention_hop is not before
    assert flex.flex_attention_hop is before
