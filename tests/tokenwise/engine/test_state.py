"""A region whose forward changes Python state trains as without memplug, and leaves the same state."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from memplug.errors import RecomputeError
from tests.support.blocks import Layer, Stack, assert_clean, assert_same, gradients, tokenwise
from tests.support.failing import Failing, MayFail
from tests.support.python_state import STATEFUL, Buffer, Number, Stateful, described

Step = Callable[[Stack, torch.Tensor], None]


def plain(model: Stack, x: torch.Tensor) -> None:
    model(x).backward()


def micro_batches(model: Stack, x: torch.Tensor) -> None:
    losses = [model(x * factor) for factor in (1, 2, 3)]
    for loss in losses:
        loss.backward()


def reversed_micro_batches(model: Stack, x: torch.Tensor) -> None:
    losses = [model(x * factor) for factor in (1, 2, 3)]
    for loss in reversed(losses):
        loss.backward()


def twice(model: Stack, x: torch.Tensor) -> None:
    loss = model(x)
    loss.backward(retain_graph=True)
    loss.backward()


def evaluated_between(model: Stack, x: torch.Tensor) -> None:
    loss = model(x)
    with torch.no_grad():
        model(x)
    loss.backward()


def dropped(model: Stack, x: torch.Tensor) -> None:
    model(x)
    model(x).backward()


STEPS: list[Step] = [plain, micro_batches, reversed_micro_batches, twice, evaluated_between, dropped]


def trained(make: Callable[[], Stateful], step: Step, alpha: float | None) -> tuple[Any, Any, Any]:
    """Train three steps; return the steps' gradients with the layers' state, the model and the executor."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Stack(2, make)
    found = []
    executor = tokenwise(model, alpha) if alpha is not None else None
    for x in torch.randn(3, 2, 6, 16):
        step(model, x)
        found.append((gradients(model), [described(layer) for layer in model.layers], described(vars(make))))
    found.append(random.getstate())
    return found, model, executor


@pytest.mark.parametrize("opaque", [True, False], ids=["opaque", "by tape"])
@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
@pytest.mark.parametrize("make", STATEFUL, ids=lambda make: make.__name__)
def test_gradients_and_state_equal_plain_training(
    make: type[Stateful], step: Step, alpha: float, opaque: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stateful, "opaque", opaque)
    plain_steps, *_ = trained(make, step, None)
    found, model, executor = trained(make, step, alpha)
    for (gradient, *state), (right, *right_state) in zip(found[:-1], plain_steps[:-1], strict=True):
        assert_same(gradient, right)
        assert state == right_state
    assert found[-1] == plain_steps[-1], "the state of Python's generator differs"
    if opaque:
        assert executor.opaque_regions == 2


class Switched(Stateful):
    """A layer that depends on attributes that the script sets."""

    def begin(self) -> None:
        self.scale, self.table = 2.0, {"shift": 1.0}

    def moves(self, y: torch.Tensor) -> Any:
        return self.scale + self.table["shift"] + self.training + len(self._modules)


def test_recompute_pass_sees_the_attributes_of_its_forward() -> None:
    found = []
    for attached in (False, True):
        torch.manual_seed(0)
        model = Stack(2, Switched)
        if attached:
            tokenwise(model, 1.0)
        loss = model(torch.randn(2, 6, 16))
        model.eval()
        for layer in model.layers:
            layer.scale, layer.table["shift"] = 7.0, 9.0
            layer.norm = torch.nn.Identity()
            layer.added = torch.nn.Identity()
        loss.backward()
        found.append((gradients(model), [described(layer) for layer in model.layers]))
    assert_same(found[1][0], found[0][0])
    assert found[1][1] == found[0][1]


class Fails(Number):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return MayFail.apply(super().forward(x))


def test_recompute_pass_that_raises_restores_the_state() -> None:
    model = Stack(2, Fails)
    tokenwise(model, 1.0)
    loss = model(torch.randn(2, 6, 16))
    before = [described(layer) for layer in model.layers]
    Failing.arm(1, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    Failing.arm(0)
    assert [described(layer) for layer in model.layers] == before


class Iterates(Stateful):
    """A layer that depends on an iterator, whose state memplug cannot read."""

    def begin(self) -> None:
        self.numbers = itertools.count(1)

    def moves(self, y: torch.Tensor) -> Any:
        return next(self.numbers)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_region_with_state_that_cannot_be_restored_never_runs_again(
    step: Step, caplog: pytest.LogCaptureFixture
) -> None:
    right, *_ = trained(Iterates, step, None)
    with caplog.at_level(logging.WARNING, "memplug"):
        found, model, _ = trained(Iterates, step, 1.0)
    for (gradient, *_), (expected, *_) in zip(found[:-1], right[:-1], strict=True):
        assert_same(gradient, expected)
    (warning,) = [record.message for record in caplog.records if "is opaque" in record.message]
    assert "it holds a count, whose state cannot be put back, so that all that it saves stays" in warning


class Sudden(Stateful):
    """A layer that is opaque while `is_sudden` is set; with `moves_names` it counts its forwards in an attribute."""

    is_sudden = moves_names = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.moves_names:
            self.calls = getattr(self, "calls", 0) + 1
        y = self.inner(x)
        with contextlib.suppress(RuntimeError):
            if self.is_sudden:
                y @ y[..., :3]
        return x + self.out(y.sigmoid())


@pytest.mark.parametrize("moves_names", [False, True])
def test_suddenly_opaque_forward_runs_again_unless_it_changes_state(
    moves_names: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sudden, "moves_names", moves_names)
    torch.manual_seed(0)
    model, reference = Stack(2, Sudden), Stack(2, Sudden)
    reference.load_state_dict(model.state_dict())
    tokenwise(model, 0.0)
    x = torch.randn(2, 6, 16)
    for _ in range(4):
        model(x).backward()
        gradients(model)
    monkeypatch.setattr(Sudden, "is_sudden", True)
    loss = model(x)
    state = [described(layer) for layer in model.layers]
    if moves_names:
        with pytest.raises(
            RecomputeError, match="changes attributes in its forward, and a forward was opaque"
        ) as error:
            loss.backward()
        assert "tokenwise.regions" in error.value.advice
    else:
        loss.backward()
        reference(x).backward()
        assert_same(gradients(model), gradients(reference))
    assert [described(layer) for layer in model.layers] == state


class Collects(Layer):
    """A layer that appends to a list and counts in an object; both are its arguments."""

    def forward(self, x: torch.Tensor, seen: list[torch.Tensor], counts: Any) -> torch.Tensor:
        y = self.inner(x)
        y.data_ptr()
        seen.append(y.detach())
        counts.calls += 1
        return x + self.out((y * len(seen) * counts.calls).sin())


class Counts:
    calls = 0


def test_recompute_pass_does_not_change_arguments_a_second_time() -> None:
    found = []
    for attached in (False, True):
        torch.manual_seed(0)
        model = Stack(2, Collects)
        if attached:
            tokenwise(model, 1.0)
        seen: list[torch.Tensor] = []
        counts, x = Counts(), torch.randn(2, 6, 16).requires_grad_() * 1
        for layer in model.layers:
            x = layer(x, seen, counts)
        x.square().sum().backward()
        found.append((gradients(model), described(seen), counts.calls))
    assert_same(found[1][0], found[0][0])
    assert found[1][1:] == found[0][1:]


def test_frames_of_forwards_without_backward_do_not_accumulate() -> None:
    model = Stack(1, Buffer)
    executor = tokenwise(model, 1.0)
    for _ in range(5):
        model.layers[0].last = model(torch.randn(2, 6, 16))
    assert executor.flow.live == 1
    model.layers[0].last = None
    assert_clean(executor)
