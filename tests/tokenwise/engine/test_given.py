"""Writes, between a region's forward and its backward, to memory that the region reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor, init_device_mesh

import memplug
from memplug.errors import InPlaceError
from memplug.tokenwise.engine.units import Unit
from tests.support.blocks import Stack, assert_clean, assert_same, gradients, tokenwise, train_stacks
from tests.support.hidden import run_as_unit
from tests.support.with_and_without import block

WIDTH = 16
NAMED = torch.zeros(WIDTH)
Read = Callable[["Reads", torch.Tensor], torch.Tensor]


class Adds(torch.autograd.Function):
    """Adds a vector by a kernel that no operator shows, without saving it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        out.detach().numpy()[...] = x.detach().numpy() + shift.detach().numpy()
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, gradient.sum((0, 1))


class Reads(nn.Module):
    """A layer that adds a vector, which autograd does not save.

    With `last`, the layer adds the vector after autograd has saved all tensors, else before a matmul.
    """

    def __init__(self, read: str, last: bool, address: bool) -> None:
        super().__init__()
        self.read, self.last, self.address = READS[read], last, address
        self.inner, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("mean", torch.randn(WIDTH))
        self.vectors = [torch.randn(WIDTH)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x).sin()
        if self.address:
            y.data_ptr()
        y = y if self.last else self.read(self, y).sin()
        y = x + self.out(y)
        return self.read(self, y) if self.last else y

    def written(self) -> torch.Tensor:
        """Return the tensor that `read` reads."""
        return {_buffer: self.mean, _values: self.mean, _attribute: self.vectors[0], _global: NAMED}.get(
            self.read, self.shift
        )


def _parameter(layer: Reads, y: torch.Tensor) -> torch.Tensor:
    return y + layer.shift


def _view(layer: Reads, y: torch.Tensor) -> torch.Tensor:
    return (y.view(*y.shape[:-1], 4, 4) + layer.shift.view(4, 4)).view_as(y)


def _buffer(layer: Reads, y: torch.Tensor) -> torch.Tensor:
    return y + layer.mean


def _values(layer: Reads, y: torch.Tensor) -> torch.Tensor:
    return y + torch.tensor(layer.mean.tolist())


def _attribute(layer: Reads, y: torch.Tensor) -> torch.Tensor:
    return y + layer.vectors[0]


def _global(layer: Reads, y: torch.Tensor) -> torch.Tensor:
    return y + NAMED


def _data(layer: Reads, y: torch.Tensor) -> torch.Tensor:
    return y + layer.shift.data


def _hidden(layer: Reads, y: torch.Tensor) -> torch.Tensor:
    return Adds.apply(y, layer.shift)


def _transform(layer: Reads, y: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: row + layer.shift)(y)


READS: dict[str, Read] = {
    read.__name__.strip("_"): read
    for read in (_parameter, _view, _buffer, _values, _attribute, _global, _data, _hidden, _transform)
}


def _in_optimizer(vector: torch.Tensor) -> None:
    vector.grad = torch.ones_like(vector)
    torch.optim.SGD([vector], 1.0).step()
    vector.grad = None


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place": lambda vector: vector.add_(1),
    "a part": lambda vector: vector[:3].mul_(5),
    "copied to": lambda vector: vector.detach().copy_(torch.ones(WIDTH)),
    "optimizer": _in_optimizer,
}


def trained(model: Stack, write: Callable[[Reads], Any], steps: int = 2) -> dict[str, torch.Tensor]:
    """Return the last step's gradients; in that step call `write` on the first layer between forward and backward."""
    for step in range(steps):
        torch.manual_seed(step)
        model.zero_grad()
        loss = model(torch.randn(2, 6, WIDTH))
        if step + 1 == steps:
            with torch.no_grad():
                write(model.layers[0])
        loss.backward()
    return gradients(model)


def stack(read: str, last: bool = False, address: bool = False) -> Stack:
    torch.manual_seed(0)
    NAMED.fill_(1)
    return Stack(2, lambda: Reads(read, last, address))


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("address", [False, True])
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("write", WRITES)
def test_writing_to_a_tensor_that_a_region_read_is_harmless_or_raises(
    write: str, read: str, address: bool, alpha: float
) -> None:
    expected = trained(stack(read, address=address), lambda layer: WRITES[write](layer.written()))
    model = stack(read, address=address)
    executor = tokenwise(model, alpha)
    try:
        measured = trained(model, lambda layer: WRITES[write](layer.written()))
    except InPlaceError as error:
        assert "region layers." in str(error) and error.advice
    else:
        assert_same(measured, expected, exact=alpha in (0, 1))
        assert not executor.opaque_regions or read == "values", "running the module again would read the written values"
    del model
    assert_clean(executor)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("read", [read for read in READS if read != "hidden"])
def test_writing_to_a_tensor_read_after_all_saved_ones_is_harmless(read: str, alpha: float) -> None:
    expected = trained(stack(read, True, True), lambda layer: layer.written().add_(1))
    model = stack(read, True, True)
    executor = tokenwise(model, alpha)
    assert_same(trained(model, lambda layer: layer.written().add_(1)), expected)
    assert executor.opaque_regions == 2


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("address", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("read", ["parameter", "view", "hidden", "transform"])
def test_optimizer_may_step_parameters_during_backward(
    read: str, last: bool, address: bool, tied: bool, alpha: float
) -> None:
    def train(model: Stack) -> list[Any]:
        if tied:
            model.layers[1].shift = model.layers[0].shift
        return stepped_in_backward(model)

    expected = train(stack(read, last, address))
    model = stack(read, last, address)
    tokenwise(model, alpha)
    for measured, right in zip(train(model), expected, strict=True):
        assert_same(measured, right)


def stepped_in_backward(model: Stack) -> list[dict[str, torch.Tensor]]:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_step)
    return [trained(model, lambda layer: None, steps) for steps in (1, 2, 3)]


def _step(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=0.1)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_optimizer_may_step_a_parameter_of_a_unit_during_backward(alpha: float) -> None:
    def shifting() -> Stack:
        model = stack("parameter", True, True)
        for layer in model.layers:
            layer.last_part, layer.read = Shifts(), lambda layer, y: layer.last_part(y)
        return model

    model = shifting()
    executor = tokenwise(model, alpha)
    for layer in model.layers:
        run_as_unit(layer.last_part, Unit(executor, "shifts", None, reads=layer.last_part.parameters))
    for measured, right in zip(stepped_in_backward(model), stepped_in_backward(shifting()), strict=True):
        assert_same(measured, right)


class Shifts(nn.Module):
    """A layer that adds a parameter, after its region has saved all of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return y + self.shift


def flat(model: Stack) -> Stack:
    """Give all parameters of a layer one storage, as frameworks do, with separate version counters."""
    for layer in model.layers:
        memory, offset = torch.cat([p.detach().flatten() for p in layer.parameters()]), 0
        for parameter in layer.parameters():
            parameter.data = memory[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
    return model


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("address", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_parameters_in_one_storage_have_separate_versions(last: bool, address: bool, alpha: float) -> None:
    expected = trained(flat(stack("parameter", last, address)), lambda layer: layer.shift.add_(1))
    model = flat(stack("parameter", last, address))
    executor = tokenwise(model, alpha)
    try:
        measured = trained(model, lambda layer: layer.shift.add_(1))
    except InPlaceError:
        assert not last
    else:
        assert_same(measured, expected)
        assert last or not executor.opaque_regions


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _distributed(layer: Reads, y: torch.Tensor) -> torch.Tensor:
    return (DTensor.from_local(y, layer.shift.device_mesh) + layer.shift).to_local()


def _local(layer: Reads, y: torch.Tensor) -> torch.Tensor:
    return y + layer.shift.to_local()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("read", [_distributed, _local])
@pytest.mark.parametrize("address", [False, True])
def test_writing_to_a_distributed_parameter_before_backward_raises(address: bool, read: Read) -> None:
    model, mesh = stack("parameter", address=address), init_device_mesh("cpu", (1,))
    for layer in model.layers:
        layer.shift, layer.read = nn.Parameter(distribute_tensor(layer.shift.detach(), mesh, [Replicate()])), read
    with (
        memplug.attach(model, block(0.0, regions=["layers.*"])),
        pytest.raises(InPlaceError, match="region layers.0"),
    ):
        trained(model, lambda layer: layer.shift.add_(1))


class Outer(nn.Module):
    """A region that runs another region."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.out = [inner], nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.inner[0](x).sin())


def test_writing_to_a_tensor_that_a_nested_region_read_raises() -> None:
    def nested() -> Stack:
        model = stack("parameter")
        model.layers[1] = Outer(model.layers[0])
        return model

    model = nested()
    tokenwise(model, 1.0)
    with pytest.raises(InPlaceError, match="region layers.1"):
        trained(model, lambda layer: layer.inner.bias.add_(1))


class Counts(nn.Module):
    """A layer that writes to buffers in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        with torch.no_grad():
            self.mean.mul_(0.5).add_(y.mean((0, 1)))
        return y + self.mean


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_region_with_a_nested_region_that_writes_buffers_trains_exactly(alpha: float) -> None:
    def nested() -> Stack:
        torch.manual_seed(0)
        model = Stack(1, Counts)
        model.layers.append(Outer(model.layers[0]))
        return model

    model, reference = nested(), nested()
    tokenwise(model, alpha)
    for step in range(3):
        train_stacks(model, reference, step)
        assert torch.equal(model.layers[0].mean, reference.layers[0].mean)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("address", [False, True])
def test_writing_to_a_parameter_of_a_unit_before_backward_raises(address: bool, alpha: float) -> None:
    model = stack("parameter", address=address)
    executor = tokenwise(model, alpha)
    for layer in model.layers:
        layer.inner = nn.Sequential(layer.inner)
        run_as_unit(layer.inner, Unit(executor, "inner", None, reads=layer.inner.parameters))
    with pytest.raises(InPlaceError, match="region layers.0"):
        trained(model, lambda layer: layer.inner[0].bias.add_(1))


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("address", [False, True])
def test_second_backward_after_a_parameter_write_raises_or_is_exact(address: bool, alpha: float) -> None:
    model, reference = stack("parameter", address=address), stack("parameter", address=address)
    executor = tokenwise(model, alpha)
    x = torch.randn(2, 6, WIDTH)
    for network in (reference, model):
        loss = network(x)
        loss.backward(retain_graph=True)
        with torch.no_grad():
            network.layers[0].shift.add_(1)
        try:
            loss.backward()
        except InPlaceError:
            assert network is model
            return
    assert_same(gradients(model), gradients(reference))
    assert not executor.opaque_regions
