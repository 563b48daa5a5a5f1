"""An operator that raises on demand: a recompute pass runs only operators, so no module's code can raise in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Failing:
    """The state of the operator, over all of its calls.

    Attributes:
        calls: how many calls there were.
        fails_at: the call that raises, counted from 1; 0 for none.
        error: makes the error that this call raises.
    """

    calls = 0
    fails_at = 0
    error: Callable[[], BaseException] = RuntimeError

    @classmethod
    def arm(cls, fails_at: int, error: Callable[[], BaseException] = RuntimeError) -> None:
        """Count calls from now on, and raise in call `fails_at`."""
        cls.calls, cls.fails_at, cls.error = 0, fails_at, error


Failing.__module__ = torch.__name__  # memplug then takes the class for one of torch's, and does not restore its state


def _call(x: torch.Tensor) -> torch.Tensor:
    Failing.calls += 1
    if Failing.calls == Failing.fails_at:
        raise Failing.error()
    return x.clone()


_LIBRARY = torch.library.Library("memplug_tests", "DEF")
_LIBRARY.define("may_fail(Tensor x) -> Tensor")
_LIBRARY.impl("may_fail", _call, "CompositeExplicitAutograd")


class MayFail(torch.autograd.Function):
    """Copies a tensor by the operator that may fail, and saves the operator's result for backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.ops.memplug_tests.may_fail(x)
        ctx.save_for_backward(y)
        return y * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + 0 * ctx.saved_tensors[0]
