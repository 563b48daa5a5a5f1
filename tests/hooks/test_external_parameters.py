"""ZeRO 3's external parameters: gathered where a module reads or returns them, and no part of a region."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import memplug
from tests.support.hosts import block, ds_config, make_engine

WIDTH, STEPS = 8, 4


class Reads(nn.Module):
    """A layer that reads a child's parameter before the child runs, as PEFT's LoRA does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(functional.gelu(self.a(x.to(self.a.weight.dtype))))


class Multiplies(Reads):
    """A layer that multiplies by a child's weight without calling the child."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(functional.gelu(functional.linear(x, self.a.weight, self.a.bias)))


class WithBias(nn.Linear):
    """A linear layer that leaves its bias to the caller, as Megatron's do."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return functional.linear(x, self.weight), self.bias


class Returns(nn.Module):
    """A layer whose child returns a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = WithBias(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, bias = self.a(x)
        return x + self.b(functional.gelu(hidden + bias))


class Borrows(Reads):
    """A layer that multiplies by the weight of a module outside of the region."""

    def __init__(self) -> None:
        super().__init__()
        self.lender: list[nn.Linear] = []  # in a list, so that the lender is no child module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(functional.linear(x, self.lender[0].weight))


class Net(nn.Module):
    """A network that begins with the same weights each time it is made."""

    def __init__(self, kind: type[nn.Module]) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(kind() for _ in range(3))
        for layer in self.layers:
            if isinstance(layer, Borrows):
                layer.lender.append(self.inp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def trained(kind: type[nn.Module], memplug_block: dict[str, Any] | None) -> tuple[list[float], list[torch.Tensor], Any]:
    """Return losses, final weights, and the number of external parameters of each module, by name."""
    import deepspeed

    memplug.install()
    engine = make_engine(ds_config(3, memplug_block), Net(kind))
    memplug.uninstall()
    session = memplug.attach(engine) if memplug_block else None
    losses = []
    for step in range(STEPS):
        if step == 2:
            with torch.no_grad():
                losses.append(engine(_batch(9)).item())
        loss = engine(_batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    weights = []
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters(parameter):
            weights.append(parameter.detach().clone())
    external = {name: len(module._external_params) for name, module in engine.module.named_modules()}
    if session is not None:
        report = session.report().tokenwise
        assert report.recomputed_in_full == 0 and report.offloaded_bytes > 0
        session.detach()
    return losses, weights, external


def _batch(seed: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("alpha", [0, 1])
@pytest.mark.parametrize("kind", [Reads, Multiplies, Returns, Borrows])
def test_models_with_external_parameters_train_as_without_memplug(
    cpu_engine: None, kind: type[nn.Module], alpha: float
) -> None:
    losses, weights, external = trained(kind, None)
    measured = trained(kind, block(alpha=alpha, regions=["layers.*"]))
    assert measured[0] == losses
    assert all(map(torch.equal, measured[1], weights))
    assert measured[2] == external, "a recompute pass must not register parameters with other modules"
