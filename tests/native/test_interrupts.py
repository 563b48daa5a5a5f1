"""Ctrl-C at any moment: Python raises it before or after any call, and the next step is as if nothing had happened."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import eval_frame

from memplug.tokenwise.engine import executor as module
from memplug.tokenwise.engine.core import core
from tests.support.blocks import (
    Block,
    Drops,
    DropsAttention,
    Stack,
    assert_clean,
    assert_same,
    gradients,
    no_garbage_collection,
    tokenwise,
    twin,
)
from tests.support.failing import Failing, MayFail

FOLDER = str(Path(module.__file__).parent)


class Interrupts:
    """Raises `KeyboardInterrupt` at the n-th moment in the code of memplug's executor.

    A moment is a point where Python itself could raise it: before or after a call.
    """

    def __init__(self, moment: int):
        self.moments_left = moment

    def __enter__(self) -> None:
        sys.setprofile(self._at)

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(None)

    def _at(self, frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(FOLDER):
            self.moments_left -= 1
            if self.moments_left == 0:
                raise KeyboardInterrupt


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("block", [Block, DropsAttention], ids=lambda block: block.__name__)
def test_interrupt_at_any_moment_leaks_nothing_and_next_step_is_correct(
    block: Callable[[], nn.Module], alpha: float
) -> None:
    torch.manual_seed(0)
    model = Stack(3, block)
    reference = twin(model)
    executor = tokenwise(model, alpha)
    moment, interrupted = 0, True
    with no_garbage_collection():
        while interrupted:
            x, loss = torch.randn(2, 6, 16), None
            interrupts, interrupted = Interrupts(moment), False
            try:
                with interrupts:
                    loss = model(x)
                    loss.backward()
            except KeyboardInterrupt:
                interrupted = True
            del loss
            model.zero_grad()
            assert core().paused() == 0 and executor.recomputing == 0 and torch.is_grad_enabled()
            assert eval_frame._stance.stance == "default", "the compiler's stance is unchanged"
            assert_clean(executor)
            for network in (model, reference):
                torch.manual_seed(moment)
                network(x).backward()
            assert_same(gradients(model), gradients(reference), exact=alpha in (0, 1))
            moment, interrupted = moment + 1, interrupted or moment == 0
    assert moment > 25


class DropsThenMayFail(Drops):
    """Draws random numbers before and after an operator that a recompute pass runs again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(MayFail.apply(super().forward(x)))


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_failed_recompute_pass_restores_the_random_generator(error: type[BaseException], alpha: float) -> None:
    torch.manual_seed(0)
    model = Stack(3, DropsThenMayFail)
    executor = tokenwise(model, alpha)
    for x in torch.randn(2, 2, 6, 16):
        model(x).backward()
    loss = model(torch.randn(2, 6, 16))
    state = torch.get_rng_state()
    Failing.arm(2, error)
    with pytest.raises(error):
        loss.backward()
    Failing.arm(0)
    assert torch.equal(torch.get_rng_state(), state)
    del loss
    assert_clean(executor)
