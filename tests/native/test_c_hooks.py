"""Errors in C functions that torch and Python call become Python errors, and leak nothing."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from memplug.tokenwise.engine.core import core
from tests.support.blocks import Block, Stack, tokenwise
from tests.support.failing import Failing, MayFail
from tests.support.native_forward import Run


class Fails(Block):
    """A block whose recompute pass may fail."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return MayFail.apply(super().forward(x))


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("out of memory")


def test_saving_a_tensor_after_its_forward_ended_raises() -> None:
    run = Run(core(), lambda: torch.randn(2, requires_grad=True).exp())
    pack = run.forward.pack()
    del run
    gc.collect()
    with pytest.raises(RuntimeError, match="a tensor was saved for backward after its region's forward had ended"):
        pack(torch.ones(2))


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
def test_backward_raises_the_error_of_its_recompute_pass(error: Callable[[], BaseException]) -> None:
    model = Stack(2, Fails)
    tokenwise(model, 0.0)
    loss = model(torch.randn(2, 6, 16))
    Failing.arm(1, error)
    with pytest.raises(error):
        loss.backward()
    Failing.arm(0)


def test_failing_explain_hook_leaves_recursion_depth_unchanged() -> None:
    model = Stack(1, Fails)
    executor = tokenwise(model, 0.0)

    def fails(*_: Any) -> None:
        raise ValueError("while it was explained")

    executor.hooks = replace(executor.hooks, explain=fails)
    for _ in range(sys.getrecursionlimit() + 100):
        loss = model(torch.randn(1, 2, 16))
        Failing.arm(1, out_of_memory)
        with pytest.raises(ValueError, match="while it was explained"):
            loss.backward()
    Failing.arm(0)
    model(torch.randn(1, 2, 16)).backward()
