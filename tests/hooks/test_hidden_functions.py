"""Custom autograd functions that launch kernels of their own are units from a region's second forward on."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memplug
from memplug.errors import ConflictError
from memplug.hooks.units import make_unit
from memplug.tokenwise.engine.units import Unit
from tests.support.blocks import Layer, Stack, assert_same, gradients, twin
from tests.support.hidden_functions import BLOCK, ran, train


class Doubled(torch.autograd.Function):
    """A function that allocates memory by operators, and fills it without them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ran.append("Doubled")
        out, squares = torch.empty_like(x), torch.empty_like(x)
        out.detach().numpy()[...] = x.detach().numpy() ** 2
        squares.detach().numpy()[...] = 2 * x.detach().numpy()
        ctx.save_for_backward(squares)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (squares,) = ctx.saved_tensors
        return gradient * squares


class ReadsTwice(Doubled):
    """A function whose backward reads its saved tensors twice."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (ctx.saved_tensors[0] + ctx.saved_tensors[0]) / 2


class Seen(torch.autograd.Function):
    """The function `Doubled`, written with operators."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ran.append("Seen")
        ctx.save_for_backward(2 * x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (squares,) = ctx.saved_tensors
        return gradient * squares


class Drops(torch.autograd.Function):
    """A function that draws a random mask, and applies the mask by its own kernel."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ran.append("Drops")
        mask, out = torch.rand_like(x), torch.empty_like(x)
        out.detach().numpy()[...] = x.detach().numpy() * mask.numpy()
        ctx.save_for_backward(mask)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (mask,) = ctx.saved_tensors
        return gradient * mask


class ForksAndDrops(Drops):
    """Like `Drops`, but it restores the random generator's state."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            return Drops.forward(ctx, x)


class DropsAndForks(Layer):
    """A layer that uses `Drops` and `ForksAndDrops` between two dropouts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.dropout(self.inner(x), 0.3)
        return x + torch.nn.functional.dropout(self.out(ForksAndDrops.apply(Drops.apply(y)).sigmoid()), 0.3)


class Both(Layer):
    """A layer that calls each of `Doubled` and `Seen` between two linear layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(Doubled.apply(self.inner(x)) + Seen.apply(self.inner(x)))


class Chosen(Layer):
    """A layer whose first rows go through `Doubled`, and the rest through `Seen`."""

    first = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x).flatten(0, 1)
        parts = Doubled.apply(y[: self.first]), Seen.apply(y[self.first :])
        return x + self.out(torch.cat(parts).sigmoid()).view_as(x)


class Nested(torch.autograd.Function):
    """A function whose forward calls another hidden function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return Doubled.apply(x.detach()) * 0.5

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x


@torch.library.custom_op("memplug_tests::doubled", mutates_args=())
def _doubled(x: torch.Tensor) -> torch.Tensor:
    """Run a hidden function inside of an operator, whose schema covers the function's effects."""
    ran.append("operator")
    out = Doubled.apply(x)
    out.data_ptr()
    return out


_doubled.register_autograd(
    lambda ctx, gradient: gradient * 2 * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


class WithOperator(Layer):
    """A layer that calls a custom operator, which has its own backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(_doubled(self.inner(x)))


class Inside(Layer):
    """A layer whose hidden function calls another; with `takes_address`, the layer also takes a tensor's address."""

    takes_address = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = Nested.apply(self.inner(x))
        if self.takes_address:
            y.data_ptr()
        return x + self.out(Doubled.apply(y))


def test_function_with_its_own_kernels_becomes_a_unit() -> None:
    report = train(Both)
    assert report["opaque_regions"] == 0 == report["recomputed_in_full"]
    assert report["ran"] == {"Doubled": 3, "Seen": 3}, "with alpha 1 none of them runs again"


@pytest.mark.parametrize("alpha", [0.0, 1.0, "auto"])
def test_function_becomes_a_unit_once_a_call_has_elements(alpha: float | str, monkeypatch: pytest.MonkeyPatch) -> None:
    # at first the function gets no elements, like an expert that gets no tokens
    torch.manual_seed(0)
    model = Stack(3, Chosen)
    reference = twin(model)
    with memplug.attach(model, {**BLOCK, "tokenwise": BLOCK["tokenwise"] | {"alpha": alpha}}) as session:
        for first in (0, 0, 0, 5, 12, 0, 7, 7):
            monkeypatch.setattr(Chosen, "first", first)
            x = torch.randn(2, 6, 16)
            model(x).backward()
            reference(x).backward()
            assert_same(gradients(model), gradients(reference))
            session.step()
        assert session.report().tokenwise.opaque_regions == 0


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_recomputed_function_draws_the_same_random_numbers(alpha: float) -> None:
    report = train(DropsAndForks, alpha=alpha)
    assert report["opaque_regions"] == 0 == report["recomputed_in_full"]
    assert report["ran"]["Drops"] == (6 if alpha else 12)


@pytest.mark.parametrize("alpha", [0.0, 1.0, "auto"])
def test_custom_operator_does_not_count_as_a_unit(alpha: float | str) -> None:
    report = train(WithOperator, alpha=alpha)
    assert report["opaque_regions"] == 0 == report["recomputed_in_full"]
    assert report["ran"]["operator"] == report["ran"]["Doubled"], (
        "functions inside an operator are no units of the region"
    )


def test_saved_tensor_read_twice_is_recomputed_once() -> None:
    class Asks(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.out(ReadsTwice.apply(self.inner(x)).sigmoid())

    report = train(Asks, alpha=0.0)
    assert report["opaque_regions"] == 0 == report["recomputed_in_full"]
    assert report["ran"] == {"Doubled": 6}


def test_alpha_0_runs_units_again_and_replays_operators() -> None:
    report = train(Both, alpha=0.0)
    assert report["opaque_regions"] == 0
    assert report["ran"] == {"Doubled": 6, "Seen": 3}, "operators are replayed without their function"


def test_plan_predicts_the_offloaded_bytes_of_units() -> None:
    report = train(Both, steps=14, alpha="auto")
    assert report["opaque_regions"] == 0 and report["programs"] >= 1
    assert report["offloaded_step_bytes"] == report["expected_step_bytes"]


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_nested_function_is_part_of_the_outer_unit(alpha: float) -> None:
    assert train(Inside, alpha=alpha)["opaque_regions"] == 0


def test_region_with_units_is_opaque_if_it_takes_a_tensors_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Inside, "takes_address", True)
    assert train(Inside, alpha=0.0)["opaque_regions"] > 0


def test_last_detach_restores_autograd_function() -> None:
    before = vars(torch.autograd.Function)["apply"]
    first, second = (memplug.attach(Stack(2, Both), BLOCK) for _ in range(2))
    assert vars(torch.autograd.Function)["apply"] is not before
    second.detach()
    first.detach()
    assert vars(torch.autograd.Function)["apply"] is before


def test_functions_work_after_one_of_two_sessions_detaches() -> None:
    first, second = (memplug.attach(Stack(2, Both), BLOCK) for _ in range(2))
    first.detach()
    x = torch.randn(3, requires_grad=True)
    Doubled.apply(x).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())
    second.detach()


class Part(nn.Module):
    """A module that runs as a unit."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_unit_module_is_copied_and_pickled_as_its_original_class() -> None:
    model = Stack(1, Both)
    model.part = Part()
    with memplug.attach(model, BLOCK) as session:
        make_unit(model.part, Unit(session._attached.executor, "part", None), session._attached)
        assert type(model.part) is not Part and isinstance(model.part, Part)
        assert type(copy.deepcopy(model.part)) is Part
        assert type(pickle.loads(pickle.dumps(model.part))) is Part
        assert torch.equal(model.part(torch.ones(2)), torch.full((2,), 2.0))
    assert type(model.part) is Part and not any("memplug" in name for name in vars(model.part))


def test_module_with_a_replaced_forward_is_refused_as_a_unit() -> None:
    model = Stack(1, Both)
    part = Part()
    part.forward = lambda x: x
    with memplug.attach(model, BLOCK) as session, pytest.raises(ConflictError, match="replaced"):
        make_unit(part, Unit(session._attached.executor, "part", None), session._attached)


class Checkpointed(Layer):
    """A layer whose function runs in torch's checkpoint; the checkpoint's hooks receive all saved tensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(checkpoint(Doubled.apply, self.inner(x), use_reentrant=False).sigmoid())


@pytest.mark.parametrize("alpha", [0.0, 1.0, "auto"])
def test_function_inside_torch_checkpoint_makes_no_region_opaque(alpha: float | str) -> None:
    assert train(Checkpointed, alpha=alpha)["opaque_regions"] == 0


class Adds(torch.autograd.Function):
    """A function that reads a parameter without saving it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        out.detach().numpy()[...] = x.detach().numpy() + bias.detach().numpy()
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, gradient.sum((0, 1))


class Added(Layer):
    """A layer that applies `Adds` to a parameter that no operator reads."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(Adds.apply(self.inner(x), self.shift).sigmoid())


def test_parameter_changed_before_backward_raises_like_autograd() -> None:
    train(Added, alpha=0.0)
    model = Stack(2, Added)
    with memplug.attach(model, {**BLOCK, "tokenwise": BLOCK["tokenwise"] | {"alpha": 0.0}}) as session:
        for _ in range(2):
            model(torch.randn(2, 6, 16)).backward()
            session.step()
        loss = model(torch.randn(2, 6, 16))
        with torch.no_grad():
            model.layers[0].shift.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation: .* parameter that a unit"):
            loss.backward()


class Uncounted(Layer):
    """A layer that calls a unit without gradients, then with them; since the layer takes an address, it is opaque."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.part(x)
        y = self.inner(x)
        y.data_ptr()
        return x + self.out(self.part(y).sigmoid())


def test_no_grad_call_of_a_unit_does_not_consume_the_units_saved_state() -> None:
    model, states = Stack(1, Uncounted), []

    @contextlib.contextmanager
    def forward() -> Iterator[str]:
        yield "state"

    @contextlib.contextmanager
    def again(state: str | None) -> Iterator[None]:
        states.append(state)
        yield

    with memplug.attach(model, BLOCK) as session:
        make_unit(
            model.layers[0].part,
            Unit(session._attached.executor, "part", None, forward=forward, again=again),
            session._attached,
        )
        model(torch.randn(2, 6, 16)).backward()
        assert session.report().tokenwise.opaque_regions > 0 and states == ["state"]


class Passes(torch.autograd.Function):
    """A function that returns its argument, as functions of tensor parallelism do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Biased(Layer):
    """A layer whose function gets a bias before any operator has read that bias."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = Passes.apply(self.out.bias)
        return x + torch.nn.functional.linear(self.inner(x).sigmoid(), self.out.weight) + bias


def test_function_that_returns_its_argument_does_not_become_a_unit() -> None:
    torch.manual_seed(0)
    model = Stack(2, Biased)
    with memplug.attach(model, BLOCK) as session:
        model(torch.randn(2, 6, 16)).backward()
        assert not session._attached.executor.functions.found_some()
        assert session.report().tokenwise.opaque_regions == 0
