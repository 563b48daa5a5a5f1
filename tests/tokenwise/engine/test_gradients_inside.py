"""Regions whose forwards ask for gradients (`torch.autograd.grad`) train as without memplug."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from memplug.errors import RecomputeError
from memplug.tokenwise.engine.buffers import Buffers
from tests.support.asking import ASKING, BEGINNING, Draws, Force, Sometimes
from tests.support.blocks import Layer, Stack, assert_clean, assert_same, gradients, tokenwise, train_alike, twin

pytestmark = pytest.mark.device
asking = pytest.mark.parametrize("block", ASKING, ids=lambda block: block.__name__)


@asking
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_gradients_hold_if_forwards_compute_gradients_themselves(block: type[Layer], alpha: float) -> None:
    train_alike(block, alpha, steps=3)


@asking
def test_gradients_hold_when_opaque_regions_run_again(block: type[Layer]) -> None:
    class Opaque(block):  # type: ignore[misc, valid-type]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.data_ptr()
            return super().forward(x)

    executor = train_alike(Opaque, 1.0, steps=3)
    assert executor.opaque_regions == 3


@asking
@pytest.mark.parametrize("opaque", [False, True])
def test_gradients_hold_when_accumulated_over_micro_batches(block: type[Layer], opaque: bool) -> None:
    torch.manual_seed(0)
    model = Stack(2, block)
    reference = twin(model)
    tokenwise(model, 1.0)
    for region in model.regions:
        region.opaque = "for this test" if opaque else ""
    for x in torch.randn(3, 2, 6, 16):
        for network in (model, reference):
            network(x).backward()
    assert_same(gradients(model), gradients(reference))


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_backward_through_a_gradient_of_the_whole_model_is_exact(alpha: float) -> None:
    torch.manual_seed(0)
    model = Stack(2, Force)
    reference = twin(model)
    executor = tokenwise(model, alpha)
    for step in range(3):
        for network in (model, reference):
            x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(step)).to(torch.get_default_device())
            x.requires_grad_()
            (force,) = torch.autograd.grad(network(x), x, create_graph=True)
            force.square().sum().backward()
        assert_same(gradients(model), gradients(reference))
    assert_clean(executor)


beginning = pytest.mark.parametrize("block", BEGINNING, ids=lambda block: block.__name__)


def step_alike(model: Stack, reference: Stack, seed: int) -> None:
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(seed)).to(torch.get_default_device())
    for network in (model, reference):
        torch.manual_seed(seed)
        network(x).backward()
    assert_same(gradients(model), gradients(reference))
    for one, other in zip(model.buffers(), reference.buffers(), strict=True):
        assert torch.equal(one, other)


@beginning
@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("steps", [(0, 0, 1, 1, 0), (0, 1, 0, 0, 1)], ids=["from step 3 on", "in some steps"])
def test_gradients_hold_when_a_region_starts_to_compute_gradients(
    block: type[Layer], alpha: float, steps: tuple[int, ...], monkeypatch: Any
) -> None:
    torch.manual_seed(0)
    model = Stack(3, block)
    reference = twin(model)
    executor = tokenwise(model, alpha)
    for step, asks in enumerate(steps):
        monkeypatch.setattr(Sometimes, "asks", bool(asks))
        step_alike(model, reference, step)
    assert_clean(executor)


@beginning
def test_gradients_hold_when_opaque_region_starts_to_compute_gradients(block: type[Layer], monkeypatch: Any) -> None:
    torch.manual_seed(0)
    model = Stack(2, block)
    reference = twin(model)
    tokenwise(model, 1.0)
    for region in model.regions:
        region.opaque = "for this test"
    for step in range(4):
        monkeypatch.setattr(Sometimes, "asks", step > 1)
        step_alike(model, reference, step)


def test_tensors_recomputed_inside_a_forward_are_released_at_its_end(monkeypatch: Any) -> None:
    torch.manual_seed(0)
    model = Stack(1, Sometimes)
    reference = twin(model)
    executor = tokenwise(model, 1.0)
    for step in range(2):
        step_alike(model, reference, step)
    monkeypatch.setattr(Sometimes, "asks", True)
    loss = model(torch.randn(2, 6, 16))
    assert executor.flow.recomputed_bytes == 0
    loss.backward()
    assert_clean(executor)


def test_region_that_turns_opaque_while_computing_gradients_raises_once(monkeypatch: Any) -> None:
    class Hides(Sometimes):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if Sometimes.asks:
                x.data_ptr()
            return super().forward(x)

    torch.manual_seed(0)
    model = Stack(1, Hides)
    reference = twin(model)
    tokenwise(model, 1.0)
    for step in range(2):
        step_alike(model, reference, step)
    model.regions[0].native.repeats = False
    monkeypatch.setattr(Sometimes, "asks", True)
    with pytest.raises(RecomputeError, match=r"asks for a gradient in its own forward(.|\n)*Run the step again"):
        model(torch.randn(2, 6, 16)).backward()
    gradients(model)
    step_alike(model, reference, 3)


def test_error_while_restoring_buffers_is_raised(monkeypatch: Any) -> None:
    """Make the restoring of buffers fail, as when a copy reports the error of an earlier kernel."""
    as_before = Buffers.as_before

    @contextlib.contextmanager
    def fails(self: Buffers) -> Iterator[None]:
        with as_before(self):
            yield
        raise RuntimeError("a kernel failed")

    torch.manual_seed(0)
    model = Stack(1, Draws)
    reference = twin(model)
    tokenwise(model, 1.0)
    for step in range(2):
        step_alike(model, reference, step)
    with monkeypatch.context() as patched:
        patched.setattr(Sometimes, "asks", True)
        patched.setattr(Buffers, "as_before", fails)
        with pytest.raises(RuntimeError, match="a kernel failed"):
            model(torch.randn(2, 6, 16))
