"""Regions that offload late: if backward runs before their tensors must be released, nothing is copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from memplug.errors import RecomputeError
from memplug.tokenwise.engine.executor import Executor
from tests.support.blocks import Block, Layer, Stack, assert_clean, assert_same, gradients, tokenwise, twin
from tests.support.forwards import WritesAfterUse, WritesInput, WritesOutput, WritesSlices
from tests.support.simulated import Adversary, ScriptedDevice, adversarial_device

pytestmark = pytest.mark.device

IN_PLACE = [WritesOutput, WritesAfterUse, WritesSlices, WritesInput]


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(2 * x, x * x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0] + 0 * ctx.saved_tensors[1]


class ReadsTwice(Layer):
    """A layer with a custom function whose backward asks for its saved tensors twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(Squares.apply(self.inner(self.norm(x))).sigmoid().square())


left_out: list[int] = []
"""How many rows each of the next calls of `_some_rows` leaves out; later calls leave out none."""


@torch.library.custom_op("memplug_tests::some_rows", mutates_args=())
def _some_rows(x: torch.Tensor) -> torch.Tensor:
    """Choose rows by values; rounding may change the choice in a recompute pass."""
    return torch.arange(len(x) - (left_out.pop() if left_out else 0), device=x.device)


class Chooses(Layer):
    """A layer that chooses rows of a product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(self.norm(x)).flatten(0, 1)
        return x + self.out(y[_some_rows(y.detach())].exp().tanh()).view_as(x)


def trained(device: Adversary, alpha: float, block: type[nn.Module] = Block, **settings: int):
    """Return a stack that has trained one step, so that its last layer offloads late; also its twin and executor."""
    torch.manual_seed(0)
    model = Stack(4, block)
    reference = twin(model)
    executor = tokenwise(model, alpha, device, **settings)
    step(model, reference, alpha)
    end_step(model, executor)
    assert [region.native.offloads_late for region in model.regions][::3] == [False, True]
    return model, reference, executor


def step(model: Stack, reference: Stack, alpha: float, times: int = 1, seed: int = 0) -> None:
    """Run backward `times` times through one graph of each model."""
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(seed))
    for network in (model, reference):
        loss = network(x)
        for turn in range(times):
            loss.backward(retain_graph=turn < times - 1)
    assert_same(gradients(model), gradients(reference), exact=alpha in (0, 1) and times == 1)


def end_step(model: Stack, executor: Executor) -> None:
    executor.flow.end_step([region.native for region in model.regions])


@pytest.fixture(params=["late", "early"])
def device(request: pytest.FixtureRequest):
    one = adversarial_device(request.param)
    with one:
        yield one
    one.synchronize()
    assert not one.violations, one.violations


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_last_layer_is_not_offloaded_after_the_first_step(device, alpha):
    model, reference, executor = trained(device, alpha)
    first = executor.transfer.offloads
    step(model, reference, alpha, seed=1)
    assert 0 < executor.transfer.offloads - first < first
    assert_clean(executor)


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_gradients_hold_for_a_second_backward_through_a_graph(device, alpha):
    model, reference, executor = trained(device, alpha)
    step(model, reference, alpha, times=2, seed=1)
    assert_clean(executor)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_backward_may_unpack_a_saved_tensor_twice(device, alpha, times):
    model, reference, executor = trained(device, alpha, ReadsTwice)
    step(model, reference, alpha, times=times, seed=1)
    assert_clean(executor)


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_retained_graph_stays_usable_after_backward_through_a_part(device, alpha):
    model, reference, executor = trained(device, alpha)
    x = torch.randn(2, 6, 16)
    for network in (model, reference):
        loss = network(x)
        torch.autograd.grad(loss, network.layers[3].down.weight, retain_graph=True)
        loss.backward()
        del loss
    assert_same(gradients(model), gradients(reference), exact=alpha in (0, 1))
    assert_clean(executor)


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_diverging_recompute_pass_is_repeated_in_full(device, alpha):
    """Let a recompute pass diverge also after the last use of a captured tensor, whose copy is then already dropped."""
    model, reference, executor = trained(device, alpha, Chooses)
    x = torch.randn(2, 6, 16)
    loss = model(x)
    left_out.append(1)
    loss.backward()
    reference(x).backward()
    assert executor.divergences == 1
    assert_same(gradients(model), gradients(reference), exact=alpha in (0, 1))
    del loss
    assert_clean(executor)


def fill_host(executor):
    """Close the host pool between two steps, and set its budget to 0."""
    executor.pool.close()
    executor.pool.budget_bytes = 0


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_gradients_hold_when_another_forward_ends_late_offloading(device, alpha, is_full):
    model, reference, executor = trained(device, alpha)
    if is_full:
        fill_host(executor)
    first, second = torch.randn(2, 2, 6, 16)
    for network in (model, reference):
        (network(first) + network(second)).backward()
    assert_same(gradients(model), gradients(reference), exact=alpha in (0, 1))
    end_step(model, executor)
    assert not any(region.native.offloads_late for region in model.regions)
    assert_clean(executor)


@pytest.mark.parametrize("block", IN_PLACE)
@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_gradients_hold_for_in_place_writes_on_a_full_host(device, alpha, block):
    model, reference, executor = trained(device, alpha, block)
    fill_host(executor)
    for seed in (1, 2):
        step(model, reference, alpha, seed=seed)
    assert_clean(executor)


def alone(device: Adversary, alpha: float, block: type[nn.Module]):
    """Return a stack of one layer, which captures its input and offloads late; also the twin and the executor."""
    torch.manual_seed(0)
    model = Stack(1, block)
    reference = twin(model)
    executor = tokenwise(model, alpha, device)
    step_alone(model, reference, executor, alpha)
    assert executor.transfer.offloaded_total_bytes > 0
    end_step(model, executor)
    assert model.regions[0].native.offloads_late
    return model, reference, executor


def step_alone(model, reference, executor, alpha, *, seed=0, graphs=1, times=1):
    """Run backward `times` times through several graphs of both models; assert that no capture is left.

    Returns:
        The offloaded bytes.
    """
    sent_bytes = executor.transfer.offloaded_total_bytes
    data = torch.randn(graphs, 2, 6, 16, generator=torch.Generator().manual_seed(seed))
    found = []
    for network in (model, reference):
        inputs = [x.clone().requires_grad_() for x in data]
        loss = sum(network(x) for x in inputs)
        for turn in range(times):
            loss.backward(retain_graph=turn < times - 1)
        found.append({**gradients(network), **{f"input {i}": x.grad for i, x in enumerate(inputs)}})
        del loss
    assert_same(*found, exact=alpha in (0, 1))
    assert_clean(executor)
    assert executor.transfer.resident_bytes == 0
    return executor.transfer.offloaded_total_bytes - sent_bytes


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("block", IN_PLACE)
@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_captured_tensor_written_in_place_is_not_offloaded(device, alpha, block, times):
    model, reference, executor = alone(device, alpha, block)
    for seed in (1, 2):
        assert step_alone(model, reference, executor, alpha, seed=seed, times=times) == 0


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("block", IN_PLACE)
@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_released_tensor_is_restored_with_its_value_before_the_write(device, alpha, block, times):
    model, reference, executor = alone(device, alpha, block)
    assert step_alone(model, reference, executor, alpha, seed=1, graphs=4, times=times) > 0
    end_step(model, executor)
    assert not model.regions[0].native.offloads_late


class SharesInput(nn.Module):
    """Two layers that read one tensor and share its capture; the second layer writes to the tensor in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([ScalesInput(), WritesInput()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        return self.layers[0](x).square().mean() + self.layers[1](x).square().mean()


class ScalesInput(nn.Linear):
    """A layer that saves many tensors, but not its input; memplug need not release these tensors early."""

    def __init__(self) -> None:
        super().__init__(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        for _ in range(24):
            x = x.tanh()
        return super().forward(x)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_shared_input_written_by_one_region_is_restored_for_both(device, alpha, times):
    torch.manual_seed(0)
    model = SharesInput()
    reference = twin(model)
    executor = tokenwise(model, alpha, device, buffers=4)
    sent_bytes, late = [], []
    for seed, graphs in enumerate((1, 1, 3)):
        sent_bytes.append(step_alone(model, reference, executor, alpha, seed=seed, graphs=graphs, times=times))
        end_step(model, executor)
        late.append([region.native.offloads_late for region in model.regions])
    assert late == [[True, True], [False, True], [False, False]]
    assert sent_bytes[2] > 2 * sent_bytes[1], (
        "the writing region offloads its own tensors too, as other forwards follow"
    )


@pytest.mark.cpu("it stands for two streams in Python")
@pytest.mark.parametrize("writer", ["first", "second"])
def test_writing_stream_and_copying_stream_wait_for_each_other(writer):
    class TwoStreams(ScriptedDevice):
        now = "first"

        def compute_stream(self) -> str:
            return self.now

        def record(self, stream: Any) -> Any:
            return ("event of", stream)

        def wait(self, stream: Any, event: Any) -> None:
            calls.append((stream, *event))

        def copy(self, stream: Any, destination: torch.Tensor, source: torch.Tensor) -> None:
            calls.append((stream, "copies"))
            super().copy(stream, destination, source)

    device, calls = TwoStreams(), []
    transfer = Executor(device, 1 << 20).transfer
    tensor = torch.arange(12.0).view(3, 4)
    swapped = transfer.offload(tensor, 3, later=True)
    device.now = writer
    transfer.before_write(swapped)
    before, after = ("first", "event of", "second"), ("second", "event of", "first")
    assert calls == ([before, ("first", "copies"), after] if writer == "second" else [("first", "copies")])
    tensor.zero_()
    former, rows = transfer.acquire(swapped)
    assert rows == 3 and torch.equal(former, torch.arange(12.0).view(3, 4))
    assert (transfer.resident_bytes, transfer.offloads) == (tensor.nbytes, 0)


def test_acquiring_a_dropped_tensor_raises_with_advice():
    transfer = Executor(ScriptedDevice(), 1 << 20).transfer
    swapped = transfer.offload(torch.ones(3, 4), 3, later=True)
    transfer.drop(swapped)
    with pytest.raises(RecomputeError, match=r"a captured \[3, 4\] tensor .*\nWhat to do: Pass `retain_graph=True`"):
        transfer.acquire(swapped)


def test_dropped_graph_releases_all_its_memory(device):
    model, _, executor = trained(device, 1.0)
    loss = model(torch.randn(2, 6, 16))
    del loss
    assert_clean(executor)
