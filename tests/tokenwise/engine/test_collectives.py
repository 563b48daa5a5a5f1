"""Collectives that write to their caller's tensor, as Megatron-Core's do.

A recompute pass uses a collective's captured result, or runs the collective again. All ranks must do the same, since a
collective never ends if only some of them run it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from memplug.tokenwise.engine import operators
from memplug.tokenwise.engine.core import paused
from memplug.tokenwise.engine.operators import CaptureKind, kind_of
from tests.support.blocks import Layer, Stack, assert_clean, assert_same, gradients, tokenwise, train_alike, twin
from tests.support.collective_layers import Exchanges, _Filled, filling
from tests.support.counting import Launches
from tests.support.forking import launch_forked


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    """Make a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class _InPlace(torch.autograd.Function):
    """The exit of a row-parallel layer: reduces the matmul's output in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


FILLS = {
    "_allgather_base_": dist.all_gather_into_tensor,
    "_reduce_scatter_base_": dist.reduce_scatter_tensor,
    "alltoall_base_": dist.all_to_all_single,
}


class Reduces(Layer):
    """A layer that reduces twice: backward needs the first result, but not the second."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = _InPlace.apply(self.inner(self.norm(x))).sigmoid()
        return x + _InPlace.apply(self.out(y))


def _is_launch(func: Any) -> bool:
    """Return whether an operator is a collective, or an operator of these tests that launches one.

    `Launches` counts such an operator and its collective as one launch.
    """
    return operators.is_exchange(func) or func.namespace == "memplug_tests"


def launched_again(layer: type[Layer], alpha: float, **settings: Any) -> list[int]:
    """Return how many collectives backward launched in each of four steps, after comparing gradients."""
    torch.manual_seed(0)
    model = Stack(3, layer)
    reference = twin(model)
    executor = tokenwise(model, alpha, **settings)
    counts = []
    for x in torch.randn(4, 2, 6, 16):
        loss = model(x)
        with Launches(_is_launch) as launches:
            loss.backward()
        counts.append(launches.calls.total())
        reference(x).backward()
        assert_same(gradients(model), gradients(reference), exact=alpha in (0, 1))
        del loss
    assert_clean(executor)
    return counts


@pytest.mark.parametrize("settings", [{}, {"min_offload_bytes": 1 << 30}, {"host_budget_bytes": 2000}])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_all_reduce_of_a_matmul_output_does_not_run_again(alpha, settings):
    assert launched_again(Reduces, alpha, **settings) == [0, 0, 0, 0]


@pytest.mark.parametrize("name", FILLS)
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_collective_into_new_memory_does_not_run_again(name, alpha):
    assert kind_of(getattr(torch.ops.c10d, name).default) is CaptureKind.COLLECTIVE
    assert launched_again(filling(FILLS[name]), alpha) == [0, 0, 0, 0]


@pytest.mark.parametrize("settings", [{}, {"min_offload_bytes": 1 << 30}, {"host_budget_bytes": 2000}])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_operator_with_a_collective_inside_does_not_run_again(alpha, settings):
    assert launched_again(Exchanges, alpha, **settings) == [0, 0, 0, 0]


_BEGUN: list[Any] = []


@torch.library.custom_op("memplug_tests::begin", mutates_args=())
def _begin(x: torch.Tensor) -> torch.Tensor:
    """Start a collective on a copy of `x`, and return another copy without waiting for the collective."""
    _BEGUN.append((received := x.clone(), dist.all_reduce(received, async_op=True)))
    return x.clone()


_begin.register_autograd(lambda ctx, gradient: gradient)


def test_operator_that_does_not_await_its_collective_runs_again():
    class Begins(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.out(self.inner(_begin(self.norm(x))).tanh())

    assert launched_again(Begins, 1.0) == [3, 3, 3, 3], "on every rank, however much room it has"
    while _BEGUN:
        _BEGUN.pop()[1].wait()


def test_collective_into_existing_memory_runs_in_every_recompute_pass():
    memory = torch.zeros(2, 6, 16)
    assert launched_again(filling(dist.all_gather_into_tensor, memory), 1.0) == [3, 3, 3, 3]


def test_recompute_pass_does_not_restore_scratch_memory():
    memory = torch.zeros(2, 6, 16)
    torch.manual_seed(0)
    model = Stack(3, filling(dist.all_gather_into_tensor, memory))
    executor = tokenwise(model, 1.0)
    executor.hooks.scratch.append(lambda tensor: tensor.untyped_storage().data_ptr() == memory.data_ptr())
    model(torch.randn(2, 6, 16)).backward()
    assert memory.any(), "the recompute pass must not restore scratch memory"


def test_recompute_pass_restores_memory_from_outside_the_region():
    memory = torch.zeros(2, 6, 16)
    model = Stack(1, filling(dist.all_gather_into_tensor, memory))
    tokenwise(model, 1.0)
    loss = model(torch.randn(2, 6, 16))
    memory.fill_(7.0)
    loss.backward()
    assert (memory == 7.0).all()


def test_value_read_before_an_in_place_reduction_is_recomputed_correctly():
    class Reads(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(self.norm(x))
            before = y.detach().exp()
            return x + self.out(_InPlace.apply(y) * before)

    for alpha in (0.0, 0.3, 1.0):
        train_alike(Reads, alpha, steps=3)


def test_all_to_all_without_tokens_does_not_run_again():
    class Sparse(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nothing = _Filled.apply(self.norm(x)[:0], dist.all_to_all_single, None)
            return x + self.out(self.inner(x).tanh()) + self.inner(nothing).sum()

    assert launched_again(Sparse, 0.0) == [0, 0, 0, 0], "captured despite its few bytes"


def test_collective_that_overlaps_computation_runs_again():
    class Overlaps(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(self.norm(x)).detach()
            work = dist.all_reduce(y, async_op=True)
            z = self.inner(x).tanh()
            work.wait()
            return x + self.out(z * y)

    assert launched_again(Overlaps, 0.0) == [3, 3, 3, 3]


@pytest.mark.distributed
def test_in_place_collectives_on_two_ranks_keep_gradients_exact(tmp_path: Path) -> None:
    launch_forked(["tests.support.collectives_worker", tmp_path], module=True)
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)] == [[], []]


def test_all_gather_into_a_tensor_list_keeps_gradients_exact():
    class Lists(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x).detach()
            parts = [torch.empty_like(y)]
            dist.all_gather(parts, y)
            return x + self.out(self.inner(x).tanh()) * parts[0]

    for alpha in (0.0, 1.0):
        train_alike(Lists, alpha, steps=3)


def test_reused_address_is_not_mistaken_for_the_freed_storage():
    """Allocate while memplug is paused, perhaps at the address of a tensor that the region made and freed."""
    executors: list[Any] = []

    class Pauses(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(20):  # freed at once, so that `memory` may get the address
                torch.empty_like(x)
            with paused() if executors else torch.enable_grad():
                memory = torch.zeros_like(x)
            y = _Filled.apply(self.norm(x), dist.all_gather_into_tensor, memory)
            return x + self.out(self.inner(y).tanh())

    model = Stack(3, Pauses)
    reference = twin(model)
    executors.append(tokenwise(model, 1.0))
    launches = Launches(operators.is_exchange)
    for x in torch.randn(3, 2, 6, 16):
        loss = model(x)
        with launches:
            loss.backward()
        assert_same(gradients(model), reference_gradients(reference, x, executors))
    assert launches.calls == {"_allgather_base_": 9}, "existing memory is filled again, on every rank"


def reference_gradients(reference: Stack, x: torch.Tensor, executors: list[Any]) -> dict[str, torch.Tensor]:
    """Return the reference's gradients; empty `executors` meanwhile, so that its forward does not pause memplug."""
    held = executors.pop()
    try:
        reference(x).backward()
    finally:
        executors.append(held)
    return gradients(reference)


def test_reading_values_in_python_does_not_make_a_region_opaque():
    class Splits(Layer):
        """A layer like a token dispatcher, whose split sizes come from a tensor's values."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            chosen = (x.detach().sum(-1) > 0).sum(-1).clamp(1, 5)
            first, second = int(chosen.numpy()[0]), chosen.tolist()[1]
            y = self.norm(x)
            return x + self.out(self.inner(y).tanh()) * (first + second)

    for alpha in (0.0, 1.0):
        executor = train_alike(Splits, alpha, steps=4)
        assert executor.opaque_regions == 0
