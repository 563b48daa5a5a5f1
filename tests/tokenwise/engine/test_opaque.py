"""Regions that no tape describes: their input is swapped, all else is recomputed by running the module again."""

from __future__ import annotations

import collections
import gc
import logging
import os
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from memplug.errors import RecomputeError
from tests.support.blocks import (
    Layer,
    Stack,
    alphas,
    assert_clean,
    assert_same,
    gradients,
    tokenwise,
    train_alike,
    twin,
)
from tests.support.forwards import Statistics
from tests.support.reducing import broadcast_in_place

pytestmark = pytest.mark.device


@pytest.mark.parametrize("change", [lambda y: y[:, :1], lambda y: y.double()])
def test_recompute_pass_with_other_sizes_or_dtypes_raises(
    change: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Changes(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            # memplug does not restore environment variables
            return (change(y) if "IN_BACKWARD" in os.environ else y).sin().sum()

    model = Stack(1, Changes)
    tokenwise(model, 1.0)
    model.regions[0].opaque = "for this test"
    loss = model.layers[0](torch.randn(2, 6, 16))
    monkeypatch.setenv("IN_BACKWARD", "1")
    with pytest.raises(RecomputeError, match="a saved tensor was .* in forward and is .* when recomputed"):
        loss.backward()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("lazy", [torch.conj, torch._neg_view])
@pytest.mark.parametrize("opaque", ["", "for this test"])
def test_lazily_conjugated_or_negated_input_is_restored(
    lazy: Callable[[torch.Tensor], torch.Tensor], late: bool, opaque: str
) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return (x * x * (1 + 2j)).real.sin().sum()

    layer, model = torch.nn.Module(), torch.nn.Module()
    layer.forward, model.layers = call, [layer]
    executor = tokenwise(model, 1.0)
    (region,) = model.regions
    region.opaque, region.native.offloads_late = opaque, late
    found = []
    for run in (call, layer.forward):
        x = torch.randn(4, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        losses = [run(lazy(x * factor)) for factor in range(1, 5)]  # enough forwards that tensors have to be offloaded
        torch.stack(losses).sum().backward()
        found.append(x.grad)
    assert torch.equal(*found) and executor.transfer.prefetched_total_bytes > 0


def test_opaque_region_does_not_keep_its_model_alive() -> None:
    def train() -> weakref.ref[Any]:
        class Own(Layer):
            """A class with a closure that refers to the model."""

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + self.out(self.inner(x).sigmoid()) * len(model.layers)

        model = Stack(2, Own)
        tokenwise(model, 0.5)
        for region in model.regions:
            region.opaque = "for this test"
        model(torch.randn(2, 6, 16)).backward()
        return weakref.ref(model)

    left = train()
    gc.collect()
    assert left() is None


class TakesAddress(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        y.data_ptr()
        return x + self.out(torch.nn.functional.dropout(y.sigmoid(), 0.3))


class Point(NamedTuple):
    one: torch.Tensor
    other: Any


class Nests(Layer):
    """An opaque layer whose arguments are tensors in containers."""

    def forward(self, x: torch.Tensor, nested: dict[str, Any], *, scales: list[Any]) -> torch.Tensor:
        y = self.inner(x)
        y.data_ptr()
        (pair, point), ordered = nested["parts"], nested["ordered"]
        y = (y.unflatten(-1, (16, 2)).sum(-1) * pair[0] + pair[1]).sigmoid() * point.one * point.other + ordered[
            "last"
        ] * scales[0]
        return x + self.out((y * (scales[1] if scales[2] is None else 0)).repeat(1, 1, 2))


@alphas
def test_opaque_region_with_nested_arguments_trains_exactly(alpha: float) -> None:
    torch.manual_seed(0)
    model = Stack(1, Nests)
    reference = twin(model)
    executor = tokenwise(model, alpha)
    tensors = [torch.randn(2, 6, 16) for _ in range(5)]
    for network in (model, reference):
        own = [tensor.clone().requires_grad_() for tensor in tensors]
        x, a, b, c, d = (tensor * 1 for tensor in own)
        nested = {"parts": [(a, b), Point(c, 0.5)], "ordered": collections.OrderedDict(first=None, last=d)}
        network.layers[0](x, nested, scales=[2, 3.0, None]).sum().backward()
        network.inputs = [tensor.grad for tensor in own]
    assert executor.opaque_regions == 1
    assert_same(gradients(model), gradients(reference))
    assert all(map(torch.equal, model.inputs, reference.inputs))
    assert_clean(executor)


class Wraps(Layer):
    """A layer that computes with a tensor of its own subclass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return x + self.out(Logged(y.detach()).mul(2).inner + y)


class Logged(torch.Tensor):
    """A subclass with its own dispatch."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Logged:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    def __repr__(self) -> str:
        return "Logged"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [arg.inner if isinstance(arg, Logged) else arg for arg in args]
        return cls(func(*plain, **(kwargs or {})))


class Raises(Layer):
    """A layer that goes on after an operator that raised."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        try:
            y @ y[..., :3]
        except RuntimeError:
            pass
        return x + self.out(y.sigmoid())


class Reshapes(Layer):
    """A layer that replaces a tensor's storage in place (`set_`)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        z = torch.zeros(1).set_(y.detach())
        return x + self.out(y.sigmoid() * z)


class LeavesBlank(Layer):
    """A layer that returns memory that nothing fills."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(self.inner(x).sigmoid()) + torch.empty(x.shape[-1]).mul(0).nan_to_num()


class Mean(Statistics):
    """A layer that updates a buffer, and takes a tensor's address."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.data_ptr()
        return super().forward(x)


REASONS = {
    Mean: "memory that is read or written past torch's operators",
    TakesAddress: "memory that is read or written past torch's operators",
    Wraps: "a tensor subclass that dispatches for itself",
    Raises: "an operator that raised",
    Reshapes: "a tensor that was given other memory in place",
    LeavesBlank: "memory that no operator was seen to fill",
}


@alphas
@pytest.mark.parametrize("block", REASONS, ids=lambda block: block.__name__)
def test_opaque_region_logs_its_reason_once_and_trains_exactly(
    block: type[Layer], alpha: float, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "memplug"):
        executor = train_alike(block, alpha, exact=True)
    assert dict(executor.opaque) == {REASONS[block]: 3}
    assert sum(f"is opaque ({REASONS[block]})" in record.message for record in caplog.records) == 1


@alphas
def test_opaque_region_offloads_only_its_input(alpha: float) -> None:
    torch.manual_seed(0)
    model = Stack(3)
    reference = twin(model)
    executor = tokenwise(model, alpha)
    for region in model.regions:
        region.opaque = "for this test"
    x = torch.randn(2, 6, 16)
    model(x).backward()
    reference(x).backward()
    assert_same(gradients(model), gradients(reference))
    assert dict(executor.opaque) == {"for this test": 3}
    assert executor.transfer.offloads == 2, "the inputs of the second and the third"
    assert_clean(executor)


def filled_past_torch(and_then: Callable[[torch.Tensor], Any]) -> type[Layer]:
    """Return a layer whose kernel is no torch operator.

    `and_then` writes to the kernel's result before autograd saves that result.
    """

    class Squares(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            y = torch.empty(x.shape)
            y.numpy()[...] = x.numpy() ** 2 - 1
            and_then(y)
            ctx.save_for_backward(y)
            return y * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (y,) = ctx.saved_tensors
            return gradient * y

    class Fills(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.out(Squares.apply(self.inner(x)))

    return Fills


def halves(y: torch.Tensor) -> None:
    """Fill the first half of each row, then the second."""
    first, second = y.tensor_split(2, -1)
    first.copy_(torch.ones_like(first))
    second.fill_(2)


def chunks(y: torch.Tensor) -> None:
    """Fill the tensor in overlapping pieces."""
    flat = y.view(-1)
    flat[:150].zero_()
    torch.sin(torch.ones(flat.numel() - 100), out=flat[100:])


def permuted(y: torch.Tensor) -> None:
    """Fill the rows in random order."""
    rows = y.view(-1, y.shape[-1])
    rows[torch.randperm(len(rows))] = torch.ones_like(rows)


READERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "relu": lambda y: y.relu_(),
    "add": lambda y: y.add_(0.5),
    "gelu": lambda y: torch.ops.aten.gelu_(y),
    "all-reduce": lambda y: dist.all_reduce(y, async_op=True).wait(),
    "reduce": lambda y: dist.reduce(y, 0),
    "broadcast": lambda y: dist.broadcast(y, 0),
    "functional broadcast": lambda y: broadcast_in_place(y),
    "addmm": lambda y: y.view(-1, 32).addmm_(torch.ones(12, 3), torch.ones(3, 32)),
    "reading before": lambda y: y.copy_(y.cos()),
}
PARTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "columns": lambda y: y[..., :2].copy_(torch.ones(2)),
    "rows": lambda y: y[:1].zero_(),
    "every other": lambda y: y[..., ::2].fill_(3),
    "all but one element": lambda y: y.view(-1)[1:].fill_(3),
    "out": lambda y: torch.sin(torch.ones(1, 6, 32), out=y[1:]),
    "indices": lambda y: y.view(-1, 32).index_put_((torch.tensor([0, 3]),), torch.ones(32)),
    "scatter": lambda y: y.view(-1, 32).scatter_(1, torch.zeros(12, 1, dtype=torch.long), 3.0),
    "mask": lambda y: y.masked_fill_(torch.arange(32) < 3, 3.0),
    "in place": lambda y: y.unsqueeze_(0).squeeze_(0),
    "diagonal": lambda y: y[0].fill_diagonal_(1.0),
}
FILLERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "copy": lambda y: y.copy_(torch.ones_like(y)).relu_(),
    "draw": lambda y: y.bernoulli_(0.5).div_(0.5),
    "out": lambda y: torch.sin(torch.ones_like(y), out=y).mul_(2),
    "broadcast": lambda y: dist.broadcast(y.fill_(2), 0),
    "halves": halves,
    "chunks": chunks,
    "permutation": permuted,
    "scatter": lambda y: y.view(-1, 32).scatter_(1, torch.arange(32).expand(12, 32), torch.ones(12, 32)),
    "other shape": lambda y: y.transpose_(0, 1).zero_().transpose_(0, 1),
    "gathered rows": lambda y: [dist.all_gather_into_tensor(row, torch.ones_like(row)) for row in y],
}


@pytest.mark.cpu("it writes by numpy")
@pytest.mark.parametrize("name", READERS)
def test_operator_that_reads_its_output_does_not_count_as_filling_it(name: str, group: Any) -> None:
    executor = train_alike(filled_past_torch(READERS[name]), 1.0)
    assert dict(executor.opaque) == {"memory that no operator was seen to fill": 3}


@pytest.mark.cpu("it writes by numpy")
@pytest.mark.parametrize("name", PARTS)
def test_writing_part_of_a_tensor_does_not_count_as_filling_it(name: str) -> None:
    executor = train_alike(filled_past_torch(PARTS[name]), 1.0)
    assert dict(executor.opaque) == {"memory that no operator was seen to fill": 3}


@pytest.mark.cpu("it writes by numpy")
@pytest.mark.parametrize("name", FILLERS)
def test_region_whose_memory_is_filled_by_operators_is_not_opaque(name: str, group: Any) -> None:
    executor = train_alike(filled_past_torch(FILLERS[name]), 1.0)
    assert not executor.opaque
