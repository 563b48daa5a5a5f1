"""Tensors and host memory are released after their last use, without garbage collection, and after errors too."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from memplug.tokenwise.engine.core import core
from tests.support.awkward import live_tensors
from tests.support.blocks import (
    Block,
    Stack,
    alphas,
    assert_clean,
    assert_same,
    gradients,
    no_garbage_collection,
    tokenwise,
    train_alike,
    twin,
)
from tests.support.failing import Failing, MayFail
from tests.support.forwards import Routes
from tests.support.simulated import ScriptedDevice, adversarial_device

pytestmark = pytest.mark.device


class Stop(Exception):
    """An error in the middle of a pass."""


errors = pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])


class Fails(Block):
    """A block that raises in the pass that `armed` names, if `raises` is set.

    If `opaque` is set, the recompute pass runs the whole module again.
    """

    armed = ""
    raises = False
    opaque = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x).sigmoid()
        if self.opaque:
            x.data_ptr()
        if not self.raises:
            return x
        if self.armed == "backward":
            x.register_hook(self._raise)
        return MayFail.apply(x)

    def _raise(self, gradient: torch.Tensor) -> None:
        raise Failing.error


@alphas
@pytest.mark.parametrize("where", ["forward", "recompute", "backward"])
@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize("layer", [1, 3])
@errors
def test_step_after_an_error_is_correct_and_leaks_nothing(
    alpha: float,
    where: str,
    layer: int,
    opaque: bool,
    error: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(Fails, "opaque", opaque)
    model = Stack(4, Fails)
    model.layers[layer].raises = True
    reference = twin(model)
    executor = tokenwise(model, alpha, device := adversarial_device("late"))
    x = torch.randn(3, 2, 6, 16)
    with device, no_garbage_collection():
        model(x[0]).backward()
        gradients(model)
        monkeypatch.setattr(Fails, "armed", where)
        Failing.arm({"forward": 1, "recompute": 2, "backward": 0}[where], error)
        with pytest.raises(error):
            model(x[1]).backward()
        monkeypatch.setattr(Fails, "armed", "")
        Failing.arm(0)
        assert core().paused() == 0 and executor.recomputing == 0
        assert_clean(executor)
        model.zero_grad()
        model(x[2]).backward()
        reference(x[2]).backward()
        assert_same(gradients(model), gradients(reference), exact=alpha in (0, 1))
        assert_clean(executor)
    assert not device.violations


@pytest.mark.cpu("its copies raise")
@alphas
def test_error_before_a_forward_begins_leaks_nothing(alpha: float) -> None:
    class Broken(ScriptedDevice):
        def copy(self, stream: Any, destination: torch.Tensor, source: torch.Tensor) -> None:
            raise Stop

    model = Stack(2)
    executor = tokenwise(model, alpha, Broken())
    with no_garbage_collection():
        with pytest.raises(Stop):
            model(torch.randn(2, 6, 16))
        assert_clean(executor)


@alphas
def test_steps_leak_no_tensors_without_garbage_collection(alpha: float) -> None:
    model = Stack(3)
    executor = tokenwise(model, alpha)
    x = torch.randn(2, 6, 16)
    for _ in range(3):
        model(x).backward()
    executor.transfer.drain()
    with no_garbage_collection():
        before = len(live_tensors())
        for _ in range(20):
            model(x).backward()
        assert_clean(executor)
        assert len(live_tensors()) == before


# -- host memory -------------------------------------------------------------------------------------------------------


@alphas
@pytest.mark.parametrize("budget_bytes", [0, 512, 4096])
def test_exhausted_host_budget_warns_once_and_gradients_hold(
    alpha: float, budget_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "memplug"):
        executor = train_alike(Block, alpha, host_budget_bytes=budget_bytes, steps=3)
    assert executor.transfer.refused > 0
    assert executor.pool.capacity_bytes <= budget_bytes
    assert sum("host budget" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("budget_bytes", [4096, 20000])
def test_gradients_hold_with_routing_on_an_exhausted_host_budget(budget_bytes: int) -> None:
    train_alike(Routes, 0.3, host_budget_bytes=budget_bytes)


def test_host_memory_stays_bounded_over_changing_sequence_lengths() -> None:
    torch.manual_seed(0)
    model = Stack(3)
    executor = tokenwise(model, 0.7)
    capacities = []
    for _ in range(50):
        length = int(torch.randint(1, 40, ()))
        model(torch.randn(2, length, 16)).backward()
        executor.transfer.drain()
        assert executor.pool.used_bytes == 0
        capacities.append(executor.pool.capacity_bytes)
    assert capacities[-1] == capacities[0]
