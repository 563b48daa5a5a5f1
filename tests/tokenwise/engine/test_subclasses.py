"""Tensors with their own dispatch in and around regions: DTensor, and the result of a functional collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.blocks import Layer, Stack, assert_clean, assert_same, gradients, tokenwise
from tests.support.parallel import Reduce


class Gated(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(self.inner(self.norm(x)).sigmoid())


class ReturnsPendingResult(Gated):
    """A layer that returns a collective's pending result, which the next region receives."""

    kinds: set[type] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kinds.add(type(x))
        return Reduce.apply(super().forward(x), dist.group.WORLD)


def mesh() -> Any:
    return init_device_mesh("cpu", (1,))


def split() -> nn.Module:
    """Return a tensor-parallel model as torch makes it: parameters are DTensors, inputs of regions are not."""
    model = Stack(3, Gated)
    for layer in model.layers:
        parallelize_module(layer, mesh(), {"inner": ColwiseParallel(), "out": RowwiseParallel()})
    return model


class Whole(Stack):
    """A stack whose regions get DTensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = distribute_tensor(x, mesh(), [Shard(0)]) * 1.0
        for layer in self.layers:
            x = layer(x)
        return x.full_tensor().square().mean()


def distributed() -> nn.Module:
    """Return a model whose parameters are DTensors, as are all inputs and outputs of its regions."""
    model = Whole(3, Gated)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(parameter.data, mesh(), [Replicate()])))
    return model


def pending() -> nn.Module:
    return Stack(3, ReturnsPendingResult)


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("made", [split, distributed, pending], ids=lambda made: made.__name__)
def test_gradients_hold_with_tensor_subclasses_that_dispatch(
    made: Callable[[], nn.Module], alpha: float, group: Any
) -> None:
    torch.manual_seed(0)
    model = made()
    torch.manual_seed(0)
    reference = made()
    executor = tokenwise(model, alpha)
    for x in torch.randn(4, 2, 6, 16):
        model(x).backward()
        reference(x).backward()
        assert_same(whole(gradients(model)), whole(gradients(reference)), exact=alpha in (0, 1))
    assert executor.opaque_regions == 0 and all(region.native.repeats for region in model.regions)
    assert AsyncCollectiveTensor in ReturnsPendingResult.kinds or made is not pending
    assert_clean(executor)


def whole(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the gradients as whole tensors, gathered from their shards."""
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}


def test_fake_tensor_operators_of_dtensor_do_not_make_regions_opaque(group: Any) -> None:
    """Change the shapes: DTensor first runs an operator with new shapes on fake tensors."""
    model = distributed()
    executor = tokenwise(model, 1.0)
    for length in (3, 5, 7):
        model(torch.randn(2, length, 16)).backward()
    assert executor.opaque_regions == 0 and not any(region.opaque for region in model.regions)
