"""Each tensor that a unit's custom function saved is swapped, kept, or made again by running the unit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from memplug.tokenwise.engine.executor import Executor
from memplug.tokenwise.engine.operators import CaptureKind
from memplug.tokenwise.engine.units import Unit
from memplug.tokenwise.plan.decisions import Decision, Setting
from tests.support.blocks import Stack, assert_clean, assert_same, gradients, tokenwise, twin
from tests.support.hidden import HiddenBlock, Part, hidden, make_units, run_as_unit, runs

pytestmark = pytest.mark.device


def stacks(alpha: float = 0.0, **settings: object) -> tuple[Stack, Stack, Executor]:
    """Return a model whose hidden parts are units, its reference, and the executor."""
    torch.manual_seed(0)
    model = Stack(3, HiddenBlock)
    reference = twin(model)
    executor = tokenwise(model, alpha, **settings)
    make_units(model, executor)
    return model, reference, executor


def step(model: Stack, reference: Stack, seed: int = 0) -> None:
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(seed)).to(torch.get_default_device())
    for network in (model, reference):
        network(x).backward()
    assert_same(gradients(model), gradients(reference))


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_region_with_hidden_units_is_not_opaque(alpha: float) -> None:
    model, reference, executor = stacks(alpha)
    for seed in range(3):
        step(model, reference, seed)
    assert not executor.opaque
    assert all(region.native.repeats for region in model.regions), "later forwards follow the tape of the first"
    assert_clean(executor)


def test_uncaptured_matmul_units_run_again_and_attention_does_not() -> None:
    model, reference, executor = stacks(0.0)
    step(model, reference)
    again = {name: count - 3 for name, count in runs(model).items()}
    assert again == {"qkv": 3, "attention": 0, "projection": 3, "up": 3, "down": 0}


def test_fully_captured_units_run_once() -> None:
    model, reference, executor = stacks(1.0)
    step(model, reference)
    assert set(runs(model).values()) == {3}
    sent = executor.transfer.offloaded_total_bytes
    step(model, reference)
    assert sent > executor.transfer.offloaded_total_bytes - sent > 0, (
        "tensors that no backward needs are captured only once"
    )


def parts_of(model: Stack, name: str) -> list[tuple[int, str]]:
    """Return index and name of the operators of a region's tape that stand for a unit's tensors."""
    tape = model.regions[0].native.last
    names = [tape.record(i)[0] for i in range(len(tape))]
    units = [i for i, each in enumerate(names) if each == "memplug::unit"]
    start = units[list(HiddenBlock.kinds).index(name)] + 1
    found = []
    while start < len(names) and names[start] == "memplug::of_unit":
        found.append((start, f"memplug::of_unit.{tape.record(start)[1]}"))
        start += 1
    return found


def test_plan_decides_for_each_tensor_saved_by_a_unit() -> None:
    model, reference, executor = stacks(0.0)
    step(model, reference)
    runs(model)
    normalized, reciprocal, returned = parts_of(model, "qkv")
    plan = {
        normalized[0]: Decision(normalized[1], 1.0, keep=True),
        **{index: Decision(name, 1.0) for index, name in (reciprocal, returned, *parts_of(model, "attention"))},
    }
    for region in model.regions:
        region.set(Setting(region.key, plan=plan))
    sent = executor.transfer.offloaded_total_bytes
    step(model, reference)
    assert runs(model) == {"qkv": 3, "attention": 3, "projection": 6, "up": 6, "down": 3}
    tokens, width, heads, itemsize = 12, 16, 2, 4
    floats = width * (3 + 1) + 1 + heads  # per token: qkv, attention's result, the reciprocal, the sums
    inputs = 2 * tokens * width  # the first layer's input is not swapped
    assert executor.transfer.offloaded_total_bytes - sent == (3 * tokens * floats + inputs) * itemsize


def test_tensors_of_a_unit_can_be_unpacked_twice() -> None:
    model, reference, executor = stacks(0.0)
    x = torch.randn(2, 6, 16)

    for network in (model, reference):
        out = network.layers[0].up(x.clone().requires_grad_())
        first = torch.autograd.grad(out.sum(), network.layers[0].up.weight, retain_graph=True)
        second = torch.autograd.grad(out.sum(), network.layers[0].up.weight)
        assert torch.equal(first[0], second[0])


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_small_tensors_do_not_make_a_captured_unit_run_again(alpha: float) -> None:
    model, reference, executor = stacks(alpha, min_offload_bytes=200)  # the reciprocals that the norms save are smaller
    step(model, reference)
    runs(model)
    step(model, reference)
    assert not executor.opaque
    if alpha:
        assert set(runs(model).values()) == {3}


def test_units_outside_regions_or_without_gradients_run_unchanged() -> None:
    model, reference, executor = stacks(0.0)
    x = torch.randn(2, 6, 16)
    with torch.no_grad():
        assert torch.equal(model(x), reference(x))
    assert torch.equal(model.layers[0].up(x), reference.layers[0].up(x))
    step(model, reference)
    assert_clean(executor)


def surroundings(kind: str) -> tuple[Any, ...]:
    """Return autocast's settings for a device type, the grad mode, attention's back ends and the default device."""
    attention = torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()
    casts = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return *casts, torch.is_grad_enabled(), attention, torch.get_default_device()


class Looks(torch.autograd.Function):
    """Doubles its input, and saves the result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with hidden():
            out = x * 2.0
            ctx.save_for_backward(out)
            return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0]


class LooksPart(Part):
    """A part that records the torch settings in each of its runs."""

    def __init__(self) -> None:
        super().__init__(Looks)
        self.seen: list[tuple[Any, ...]] = []

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        self.seen.append(surroundings(tensors[0].device.type))
        return super().forward(*tensors)


class LooksBlock(nn.Module):
    """A block with a `LooksPart`."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.scale = LooksPart(), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x * self.scale) * self.scale


@contextlib.contextmanager
def another_dtype() -> Iterator[None]:
    kind = torch.get_default_device().type
    before = torch.get_autocast_dtype(kind)
    torch.set_autocast_dtype(kind, torch.float16 if before is torch.bfloat16 else torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_dtype(kind, before)


STATES = {
    "as it is": contextlib.nullcontext,
    "autocast": lambda: torch.autocast(torch.get_default_device().type, torch.bfloat16),
    "another dtype": another_dtype,
    "attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "device": lambda: torch.device("meta"),  # as the default device
}


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        *((name, "as it is") for name in STATES),
        *(("as it is", name) for name in [*STATES][1:]),
        ("autocast", "autocast"),
    ],
)
def test_unit_runs_again_with_the_torch_settings_of_its_forward(forward: str, backward: str) -> None:
    model = Stack(2, LooksBlock)
    reference = twin(model)
    executor = tokenwise(model, 0.0)
    for layer in model.layers:
        run_as_unit(layer.part, Unit(executor, "part", CaptureKind.ROWS, puts_back=False))
    for x in torch.randn(3, 2, 6, 16):
        with STATES[forward]():
            losses = [network(x) for network in (model, reference)]
        with STATES[backward]():
            for loss in losses:
                loss.backward()
    assert_same(gradients(model), gradients(reference))
    for layer in model.layers:
        assert len(layer.part.seen) == 6, "once in each forward and once in each backward"
        assert len(set(layer.part.seen)) == 1
