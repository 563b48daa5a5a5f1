"""A region whose forward changes Python state trains alike, and leaves that state as it would be without memplug."""

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
    """Returns gradients and the layers' state of three steps, and the executor."""
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
def test_gradients_and_state_are_those_without_memplug(
    make: type[Stateful], step: Step, alpha: float, opaque: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stateful, "opaque", opaque)
    plain_steps, *_ = trained(make, step, None)
    found, model, executor = trained(make, step, alpha)
    for (gradient, state, of_class), (right, right_state, right_of_class) in zip(found[:-1], plain_steps[:-1], strict=True):
        assert_same(gradient, right)
        assert state == right_state
        assert of_class == right_of_class
    assert found[-1] == plain_steps[-1], "Python's own generator"
    if opaque:
        assert executor.opaque_regions == 2
