"""Backward runs only the needed operators again, and recovers or raises if they differ from the forward's."""

from __future__ import annotations

import collections
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memplug.errors import RecomputeError
from memplug.tokenwise.plan.decisions import Setting
from tests.support.blocks import (
    Block,
    Layer,
    Stack,
    alphas,
    assert_clean,
    assert_same,
    functional,
    gradients,
    tokenwise,
    train_alike,
    twin,
)
from tests.support.counting import Operators
from tests.support.forwards import Routes
from tests.support.simulated import ScriptedDevice

pytestmark = pytest.mark.device


def backward_calls(
    block: Callable[[], nn.Module], alpha: float, layers: int = 3, step: int = 2
) -> collections.Counter[str]:
    """Return the operators that a step's backward runs in addition to those of the model without regions."""
    torch.manual_seed(0)
    model = Stack(layers, block)
    reference = twin(model)
    tokenwise(model, alpha)
    for x in torch.randn(step, 2, 6, 16):
        counts = []
        for network in (model, reference):
            loss = network(x)
            with Operators() as counter:
                loss.backward()
            counts.append(counter.calls)
    return counts[0] - counts[1]


MATMULS = ("mm", "addmm", "bmm", "baddbmm")


@pytest.mark.parametrize(("alpha", "expected"), [(0.0, 3 * 4), (0.5, 2 * 4), (1.0, 0)])
def test_backward_reruns_only_needed_matmuls_that_were_not_swapped(alpha: float, expected: int) -> None:
    """Backward needs the outputs of four of a block's five matmuls; only the residual sum reads the fifth output.

    The captured tensors of the last of three blocks are still resident, so that block runs no matmul again with alpha
    0.5.
    """
    calls = backward_calls(Block, alpha)
    assert sum(calls[name] for name in MATMULS) == expected
    assert not any("attention" in name for name in calls)


def test_region_with_all_saved_tensors_captured_runs_nothing_again() -> None:
    class Linear(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.inner(x))

    calls = backward_calls(Linear, 1.0)
    assert not {
        name for name in calls if name not in ("as_strided", "detach", "copy_", "empty_strided", "slice", "t", "view")
    }, calls


def test_uncaptured_attention_runs_again() -> None:
    torch.manual_seed(0)
    model = Stack(2)
    reference = twin(model)
    executor = tokenwise(model, 0.0)
    x = torch.randn(2, 6, 16)
    executor.time_forwards(lambda region, frame, tape: region.set(Setting("captures nothing", plan={})))
    model(x)
    loss = model(x)
    with Operators() as counter:
        loss.backward()
    assert sum(count for name, count in counter.calls.items() if "attention" in name and "backward" not in name) == 2
    reference(x).backward()
    assert_same(gradients(model), gradients(reference))
    del loss
    assert_clean(executor)


def test_topk_of_a_router_does_not_run_again() -> None:
    assert backward_calls(Routes, 0.0)["topk"] == 0


# -- forwards that are not the same twice ------------------------------------------------------------------------------


class Lazy(Layer):
    """A layer that builds a table in its first forward, and finds the table in later forwards."""

    table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(16.0).sin().cos()
        return x + self.out(self.inner(x * self.table).sigmoid())


@alphas
def test_forward_that_differs_from_the_first_is_recomputed_as_it_ran(alpha: float) -> None:
    assert train_alike(Lazy, alpha, layers=2).divergences == 0


class Changes(Layer):
    """A layer whose factor and number of iterations change from call to call."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = x * (1 / self.calls)
        for _ in range(self.calls):
            x = x.sin() * self.norm.weight
        return x + self.out((self.inner(x) * self.calls).sigmoid())


@alphas
def test_changing_scalars_and_loop_counts_are_recomputed_as_they_ran(alpha: float) -> None:
    """Run both forwards of a step before the first backward: running the module again would use later scalars."""
    train_alike(Changes, alpha, steps=4)
    torch.manual_seed(0)
    model = Stack(2, Changes)
    reference = twin(model)
    executor = tokenwise(model, alpha)
    for network in (model, reference):
        losses = [network(x) for x in torch.linspace(-1, 1, 2 * 2 * 6 * 16).view(2, 2, 6, 16)]
        for loss in losses:
            loss.backward()
    del loss, losses
    assert_same(gradients(model), gradients(reference), exact=alpha in (0, 1))
    assert_clean(executor)


class Scales(Layer):
    """A layer whose operators get other scalars in every step: a loss scale, a schedule, an exponent."""

    step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (self.inner(self.norm(x)) * (1 / (1 + Scales.step))).sigmoid()
        return x + torch.addmm(
            x.flatten(0, 1), y.flatten(0, 1).pow(2 + Scales.step), self.out.weight.t(), alpha=Scales.step
        ).view_as(x)


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_recompute_pass_uses_the_scalars_of_its_own_forward(alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the graphs of three steps in flight, and change the scalars once more before their backward."""
    torch.manual_seed(0)
    model = Stack(3, Scales)
    reference = twin(model)
    executor = tokenwise(model, alpha)
    for first in (1, 4):
        inputs = torch.randn(3, 2, 6, 16)
        for network in (model, reference):
            losses = []
            for step, x in enumerate(inputs, first):
                monkeypatch.setattr(Scales, "step", step)
                losses.append(network(x))
            monkeypatch.setattr(Scales, "step", 100)
            for loss in losses:
                loss.backward()
        assert_same(gradients(model), gradients(reference), exact=alpha in (0, 1))
    assert executor.opaque_regions == 0
    del loss, losses
    assert_clean(executor)


class Drops(Layer):
    """Layer drop: Python's generator decides whether the layer runs at all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if random.random() < 0.5:
            return x * 1
        return x + self.out(self.inner(self.norm(x)).sigmoid())


@alphas
def test_randomly_dropped_layer_is_recomputed_as_it_ran(alpha: float) -> None:
    torch.manual_seed(0)
    model = Stack(3, Drops)
    reference = twin(model)
    tokenwise(model, alpha)
    for step in range(6):
        x = torch.randn(2, 6, 16, requires_grad=True)
        for network in (model, reference):
            random.seed(step)
            network(x).backward()
        assert_same(gradients(model), gradients(reference), exact=alpha in (0, 1))


@alphas
def test_opaque_region_that_saves_other_tensors_when_rerun_raises(
    alpha: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Repeats(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.data_ptr()
            for _ in range(int(os.environ["TIMES"])):  # memplug does not restore it
                x = x.sin() * self.norm.weight
            return x

    model = Stack(2, Repeats)
    tokenwise(model, alpha)
    monkeypatch.setenv("TIMES", "1")
    loss = model(torch.randn(2, 6, 16))
    monkeypatch.setenv("TIMES", "2")
    with pytest.raises(RecomputeError, match="saved"):
        loss.backward()


class Noisy(ScriptedDevice):
    """A device whose prefetched rows are off by a rounding error, as rows of a matmul of another shape are."""

    def copy(self, stream: Any, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source * (1 - 1e-6) if source.is_floating_point() else source)


@pytest.mark.cpu("its copies are changed")
def test_recompute_pass_is_repeated_in_full_if_rounding_changes_a_mask() -> None:
    """Prefetched values are slightly too small, so they miss the threshold and the mask selects fewer of them."""
    torch.manual_seed(0)
    weight = torch.rand(8, 8, requires_grad=True)

    def call(x: torch.Tensor) -> torch.Tensor:
        y = x @ weight
        return y[y * 2 >= (y * 2).max().item()].exp().tanh() + y.sigmoid().sum()

    region, executor = functional(call, 1.0, Noisy())
    x = torch.rand(8, 8)
    gradient = []
    for run in (region, call):
        sum(run(x * (1 + index)).sum() for index in range(4)).backward()
        gradient.append({"weight": weight.grad})
        weight.grad = None
    assert executor.divergences == 3  # of four forwards, all but the last were offloaded
    assert_same(*gradient, exact=False)


def test_recompute_pass_takes_the_same_branch_despite_rounding() -> None:
    """Set the threshold to the forward's exact sum, which recomputed rows may miss by rounding."""

    class Threshold(Layer):
        threshold: float | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            seen = (y / 3).sum().item()
            if self.threshold is None:
                self.threshold = seen
            same = seen == self.threshold
            return x + self.out(y.sigmoid() * (1.0 if same else 100.0))

    train_alike(Threshold, 1.0, device=None, steps=1)
    torch.manual_seed(0)
    model = Stack(4, Threshold)
    reference = twin(model)
    tokenwise(model, 0.5, Noisy())
    x = torch.randn(2, 6, 16)
    model(x).backward()
    reference(x).backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, reference.get_parameter(name).grad, rtol=1e-3, atol=1e-4)
