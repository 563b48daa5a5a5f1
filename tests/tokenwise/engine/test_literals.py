"""Literals: tensors of Python values (`torch.tensor([1, 2])`) that a region makes.

No operator fills them. memplug keeps them like the region's arguments, and the tape covers everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from memplug.tokenwise.engine import core as native
from memplug.tokenwise.engine.tape import Form, records_of
from tests.support.blocks import (
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
from tests.support.native_forward import Keeps, Run

pytestmark = pytest.mark.device

UNFILLED = "memory that no operator was seen to fill"
ALIKE = [float(i) for i in range(32)]  # the same in every forward, for opaque layers, whose modules run again


def empty_as_in_torch_tensor(elements: int) -> torch.Tensor:
    """Return unfilled memory, allocated as for `torch.tensor`."""
    empty = torch.ops.aten.empty.memory_format
    return empty([elements], dtype=torch.float32, layout=None, device="cpu", pin_memory=False)


class Literals(Layer):
    """A layer that combines its activations with Python values that differ in each forward."""

    def __init__(self, make: Callable[[torch.Tensor, list[float]], torch.Tensor]) -> None:
        super().__init__()
        self.make = make
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        y = self.inner(self.norm(x))
        made = self.make(y, [0.5 + self.forwards + i for i in range(32)])
        return x + self.out(made.sigmoid() * y.tanh())


def written_between(y: torch.Tensor, values: list[float]) -> torch.Tensor:
    """Read the tensor, write to it in place, and read it again: one memory has two values."""
    t = torch.tensor(values)
    before = (t * 0.5).sin()
    t.mul_(-0.25)
    return y * before * t


def written_in_part(y: torch.Tensor, values: list[float]) -> torch.Tensor:
    t = torch.tensor([values, values])
    before = t.cos()
    t[1, 3:7].neg_()
    return y * before[1] * t[1] + t[0]


def written_twice(y: torch.Tensor, values: list[float]) -> torch.Tensor:
    """Write values that depend on the activations."""
    total = torch.tensor(values[0])
    total += y.detach().sum()
    first = y * total.cos()
    total.mul_(2)
    return first * total.cos()


def with_gradients(y: torch.Tensor, values: list[float]) -> torch.Tensor:
    """Write in place, so that the literal becomes part of the graph."""
    t = torch.tensor(values)
    t[:16] *= y[0, 0, 0].sigmoid()
    first = y * t
    total = torch.tensor(values[0])
    total += first.mean()
    return first * total.sin()


def without_gradients(y: torch.Tensor, values: list[float]) -> torch.Tensor:
    with torch.no_grad():
        t = torch.tensor(values)
        scale = y.sigmoid() * t
    return y * scale * t


def in_inference_mode(y: torch.Tensor, values: list[float]) -> torch.Tensor:
    with torch.inference_mode():
        t = torch.tensor(values)
        before = t * 0.5
        t += 1
    return y * ((y.detach() * t).sin() + (y.detach() * before).cos())


def indices(y: torch.Tensor, values: list[float]) -> torch.Tensor:
    order = torch.tensor([(7 * i + int(values[0])) % 32 for i in range(32)])
    return y[..., order] * y.index_select(-1, order.flip(0))


def of_numbers(y: torch.Tensor, values: list[float]) -> torch.Tensor:
    """Make a literal of Python numbers that come from activations."""
    return y * torch.tensor([y[0, 0, 0].item(), y[0, 1, 3].item()]).repeat(16)


def of_tensors(y: torch.Tensor, values: list[float]) -> torch.Tensor:
    return y * torch.tensor([y[0, 0, 0].detach(), y[0, 1, 3].detach()]).repeat(16)


def numbers_on_the_host(y: torch.Tensor, values: list[float]) -> torch.Tensor:
    """Combine a tensor on the device with scalar tensors on the CPU."""
    return (y * torch.tensor(values[0], device="cpu")).sin() * torch.tensor(3.0, device="cpu")


def to_the_device(y: torch.Tensor, values: list[float]) -> torch.Tensor:
    return y * torch.tensor(values, device="cpu", pin_memory=y.is_cuda).to(y.device, non_blocking=True).sin()


def in_halves(y: torch.Tensor, values: list[float]) -> torch.Tensor:
    return y * torch.tensor(values, dtype=torch.bfloat16).to(torch.float32).sin()


def some_more(y: torch.Tensor, values: list[float]) -> torch.Tensor:
    return sum(y * torch.tensor(values[i:] + values[:i]).sin() for i in range(4)) + torch.tensor([])[:0].sum()


def kinds(y: torch.Tensor, values: list[float]) -> torch.Tensor:
    lengths = torch.cat([torch.arange(1), torch.tensor((int(values[0]),)).cumsum(0)])
    return y * torch.as_tensor(values) * y.new_tensor(values[1:] + values[:1]) * torch.asarray(values) * lengths.sum()


def complex_values(y: torch.Tensor, values: list[float]) -> torch.Tensor:
    t = torch.tensor([complex(value, 1) for value in values])
    return (y * t).real * t.imag * torch.view_as_real(t.conj() * y)[..., 0]


MAKERS = [
    lambda y, values: y * torch.tensor(values),
    lambda y, values: (y * torch.tensor(values)).sin() + torch.tensor(values[0]).cos(),
    written_between,
    written_in_part,
    written_twice,
    with_gradients,
    without_gradients,
    in_inference_mode,
    indices,
    of_numbers,
    of_tensors,
    numbers_on_the_host,
    to_the_device,
    in_halves,
    some_more,
    kinds,
    complex_values,
]


@alphas
@pytest.mark.parametrize("least", [1, 1 << 20])
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__.strip("<>"))
def test_region_that_makes_literals_is_not_opaque(make: Callable[..., torch.Tensor], least: int, alpha: float) -> None:
    executor = train_alike(lambda: Literals(make), alpha, steps=4, exact=True, min_offload_bytes=least)
    assert not executor.opaque


EXCHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "all-reduce": dist.all_reduce,
    "all-reduce, waited for": lambda t: dist.all_reduce(t, async_op=True).wait(),
    "broadcast": lambda t: dist.broadcast(t, 0),
    "gathered rows": lambda t: dist.all_gather_into_tensor(t, torch.ones_like(t)),
}


@alphas
@pytest.mark.parametrize("name", EXCHANGES)
def test_gradients_hold_when_a_collective_writes_to_a_literal(name: str, alpha: float, group: Any) -> None:
    def exchanged(y: torch.Tensor, values: list[float]) -> torch.Tensor:
        t = torch.tensor(values)
        before = t.sin()
        EXCHANGES[name](t)
        return y * before * t * (t * 0.25).cos()

    executor = train_alike(lambda: Literals(exchanged), alpha, steps=3, exact=True)
    assert not executor.opaque


@alphas
def test_forward_of_a_region_with_literals_runs_once(alpha: float) -> None:
    calls = []

    def call(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return (x @ x.mT * torch.tensor([2.0] * 8)).sin()

    region, executor = functional(call, alpha)
    region(torch.randn(8, 8).requires_grad_() * 1).sum().backward()
    assert len(calls) == 1 and not executor.opaque


def test_literal_gets_its_gradient() -> None:
    made: list[torch.Tensor] = []

    def call(x: torch.Tensor) -> torch.Tensor:
        made.append(torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True))
        with torch.no_grad():
            made[-1].mul_(2)
        return (x @ x.mT * made[-1]).exp()

    region, executor = functional(call, 1.0)
    for run in (call, region):
        x = torch.randn(4, 4, generator=torch.Generator(torch.get_default_device()).manual_seed(0)).requires_grad_()
        run(x / 9).sum().backward()
    assert torch.equal(made[0].grad, made[1].grad) and not executor.opaque


@alphas
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
@pytest.mark.parametrize("make", MAKERS[:4], ids=["product", "sum", "written between", "written in part"])
def test_each_graph_in_flight_uses_the_literals_of_its_own_forward(
    make: Callable[..., torch.Tensor], order: tuple[int, ...], alpha: float
) -> None:
    torch.manual_seed(0)
    model = Stack(2, lambda: Literals(make))
    reference = twin(model)
    executor = tokenwise(model, alpha)
    inputs = torch.randn(3, 2, 6, 16)
    for network in (model, reference):
        losses = [network(x) for x in inputs]
        for index in order:
            losses[index].backward(retain_graph=True)
            losses[index].backward()
        del losses
    assert_same(gradients(model), gradients(reference))
    assert not executor.opaque
    assert_clean(executor)


def test_large_literal_makes_its_region_opaque() -> None:
    """Expect the module of a region with a large literal to run again, since plans do not count literals' bytes."""

    def much(y: torch.Tensor, values: list[float]) -> torch.Tensor:
        return y * torch.tensor(ALIKE * (1 << 14))[:32]

    executor = train_alike(lambda: Literals(much), 1.0)
    assert dict(executor.opaque) == {UNFILLED: 3}


def test_many_literals_make_their_region_opaque() -> None:
    def many(y: torch.Tensor, values: list[float]) -> torch.Tensor:
        for _ in range(3):
            y = y * torch.tensor(ALIKE * (1 << 12))[:32]
        return y

    executor = train_alike(lambda: Literals(many), 1.0)
    assert dict(executor.opaque) == {UNFILLED: 3}


@alphas
def test_forwards_may_alternate_between_literals_and_filled_memory(alpha: float) -> None:
    """The forwards have equal shapes, so each follows a tape up to the operator that differs."""

    def in_turn(y: torch.Tensor, values: list[float]) -> torch.Tensor:
        kind = int(values[0]) % 3
        if kind == 0:
            t = torch.tensor(values)
        elif kind == 1:
            t = empty_as_in_torch_tensor(32).fill_(values[1]).to(y.device)
        else:
            t = torch.tensor([y[0, 0, 0].item()] * 32)
        return y * t.sin() * t

    executor = train_alike(lambda: Literals(in_turn), alpha, steps=9, exact=True)
    assert not executor.opaque


def test_taking_the_address_of_a_literal_makes_its_region_opaque() -> None:
    def taken(y: torch.Tensor, values: list[float]) -> torch.Tensor:
        t = torch.tensor(ALIKE)
        t.data_ptr()
        return y * t

    executor = train_alike(lambda: Literals(taken), 1.0)
    assert dict(executor.opaque) == {"memory that is read or written past torch's operators": 3}


def test_writing_to_a_returned_literal_raises() -> None:
    """The recompute pass reads the literal again, as it reads arguments."""

    def call(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        t = torch.tensor([1.0, 2.0, 3.0, 4.0])
        return (x * (t * 2)).sin(), t

    region, executor = functional(call, 1.0)
    y, t = region(torch.randn(4, 4).requires_grad_() * 1)
    t.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    del y
    assert not executor.opaque


def filled_by_an_operator() -> torch.Tensor:
    t = empty_as_in_torch_tensor(2).fill_(3.0).to(torch.get_default_device())
    return Keeps.apply(torch.ones(1, requires_grad=True), t)


def makes_literal() -> torch.Tensor:
    return Keeps.apply(torch.ones(1, requires_grad=True), torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize("calls", [(filled_by_an_operator, makes_literal), (makes_literal, filled_by_an_operator)])
def test_tape_distinguishes_literals_from_memory_filled_by_operators(
    calls: tuple[Callable[[], Any], Callable[[], Any]],
) -> None:
    core = native.core()
    first, second = calls
    known, alone = Run(core, first).tape, Run(core, second).tape
    run = Run(core, second, (known,))
    assert not run.follows and records_of(run.tape) == records_of(alone)
    assert run.tape.given == alone.given and not run.tape.opaque
    assert Run(core, second, (alone,)).follows
    made = {number for record in records_of(run.tape) for number in record.outputs if record.form is not Form.VIEW}
    assert made.isdisjoint(number for number, given in enumerate(run.tape.given) if given)
    assert all(torch.equal(ours, saved) for ours, saved in zip(restored(run), run.saved, strict=True))


def restored(run: Run) -> list[torch.Tensor]:
    """Return the saved tensors, from a recompute pass where one is needed."""
    found = run.restored({}, pytest.fail)
    return [found.get(index, saved) for index, saved in enumerate(run.saved)]


def test_in_place_detach_does_not_count_as_a_write() -> None:
    weight = torch.ones(4, 4, requires_grad=True)

    def call() -> torch.Tensor:
        y = (weight * 2).exp()
        y.detach_()
        return weight * y

    run = Run(native.core(), call)
    assert not any(record.written for record in records_of(run.tape))
    assert all(torch.equal(ours, saved) for ours, saved in zip(restored(run), run.saved, strict=True))
