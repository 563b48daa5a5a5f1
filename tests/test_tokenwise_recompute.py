"""What backward runs again and what it does not, and what happens where the second pass is not the same."""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memplug.errors import RecomputeError
from memplug.execute.device import Device
from tests.blocks import (
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
from tests.forwards import Routes

pytestmark = pytest.mark.device


class Counter(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name.partition("::")[2] if func.namespace == "aten" else func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def backward_calls(
    block: Callable[[], nn.Module], alpha: float, layers: int = 3, step: int = 2
) -> collections.Counter[str]:
    """Operators that run in the backward of the given step beyond those of the same model without regions."""
    torch.manual_seed(0)
    model = Stack(layers, block)
    reference = twin(model)
    tokenwise(model, alpha)
    for x in torch.randn(step, 2, 6, 16):
        counts = []
        for network in (model, reference):
            loss = network(x)
            with Counter() as counter:
                loss.backward()
            counts.append(counter.calls)
    return counts[0] - counts[1]


MATMULS = ("mm", "addmm", "bmm", "baddbmm")


@pytest.mark.parametrize(("alpha", "expected"), [(0.0, 3 * 4), (0.5, 2 * 4), (1.0, 0)])
def test_backward_runs_the_matmuls_that_were_not_swapped_and_the_dead_last_one_never(
    alpha: float, expected: int
) -> None:
    """A block has five; nothing reads the output of the last one but the residual sum behind it. The last of three
    blocks is still on the device, whole.
    """
    calls = backward_calls(Block, alpha)
    assert sum(calls[name] for name in MATMULS) == expected
    assert not any("attention" in name for name in calls)


def test_a_region_whose_saved_tensors_are_all_captured_runs_nothing_again() -> None:
    class Linear(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.inner(x))

    calls = backward_calls(Linear, 1.0)
    assert not {
        name for name in calls if name not in ("as_strided", "detach", "copy_", "empty_strided", "slice", "t", "view")
    }, calls


def test_attention_is_run_again_where_it_is_not_captured() -> None:
    torch.manual_seed(0)
    model = Stack(2)
    reference = twin(model)
    executor = tokenwise(model, 0.0)
    x = torch.randn(2, 6, 16)
    executor.on_frame = lambda frame: setattr(frame.region, "plan", {})  # a plan that captures nothing
    model(x)
    loss = model(x)
    with Counter() as counter:
        loss.backward()
    assert sum(count for name, count in counter.calls.items() if "attention" in name and "backward" not in name) == 2
    reference(x).backward()
    assert_same(gradients(model), gradients(reference))
    del loss
    assert_clean(executor)


def test_an_unread_routing_choice_is_not_made_again() -> None:
    assert backward_calls(Routes, 0.0)["topk"] == 0


# -- forwards that are not the same twice ------------------------------------------------------------------------------


class Lazy(Layer):
    """Builds a table in its first forward and finds it in later ones."""

    table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(16.0).sin().cos()
        return x + self.out(self.inner(x * self.table).sigmoid())


@alphas
def test_a_second_pass_of_other_operators_recomputes_in_full_and_is_counted(
    alpha: float, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "memplug"):
        executor = train_alike(Lazy, alpha, layers=2)
    assert executor.divergences == 2  # the first step of each layer
    assert sum("recomputed in full" in record.message for record in caplog.records) == 1


@alphas
def test_a_second_pass_of_fewer_operators_recomputes_in_full_though_each_was_expected(alpha: float) -> None:
    """Forward runs tanh of a table and tanh of the input, the second pass only the latter: it must not be taken for
    the former.
    """
    table: list[torch.Tensor] = []
    constant = torch.randn(8, 8)

    def call(x: torch.Tensor) -> torch.Tensor:
        if not table:
            table.append(torch.tanh(constant))
        return torch.tanh(x)

    region, executor = functional(call, alpha)
    x = torch.randn(8, 8, requires_grad=True)
    region(x * 1.0).sum().backward()
    assert executor.divergences == 1
    torch.testing.assert_close(x.grad, 1 - x.detach().tanh().square())


def test_a_second_pass_that_saves_other_tensors_is_an_error() -> None:
    class Counting(Layer):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            for _ in range(self.calls):
                x = x.sin() * self.norm.weight
            return x

    model = Stack(2, Counting)
    tokenwise(model, 0.3)
    with pytest.raises(RecomputeError, match="saved"):
        model(torch.randn(2, 6, 16)).backward()


class Noisy(Device):
    """Brings back rows that differ by a rounding, as another shape of a product gives them."""

    def copy(self, stream: Any, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source * (1 - 1e-6) if source.is_floating_point() else source)


@pytest.mark.cpu("its copies are changed")
def test_a_mask_that_rounding_changes_recomputes_in_full() -> None:
    """A smaller value than forward saw no longer reaches the threshold, and the selection is shorter."""
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
    assert executor.divergences == 3  # all but the last have left the device
    assert_same(*gradient, exact=False)


def test_a_branch_taken_in_forward_is_taken_again_though_the_number_rounds_differently() -> None:
    """The sum of the rows is within rounding of the threshold, which is the very value that forward saw."""

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
