"""Counts of memory stay correct when other threads free graphs, and in both processes after a fork."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable

import pytest
import torch

from tests.support.blocks import (
    Layer,
    Stack,
    alphas,
    assert_clean,
    assert_same,
    gradients,
    no_garbage_collection,
    tokenwise,
    train_stacks,
    twin,
)
from tests.support.forking import launch_forked

pytestmark = pytest.mark.device


@alphas
def test_graphs_freed_on_other_threads_are_counted_as_freed(alpha: float) -> None:
    model = Stack(2)
    executor = tokenwise(model, alpha)
    losses = [model(torch.randn(2, 6, 16)) for _ in range(16)]
    assert executor.flow.live == 32 and model.regions[0].native.peak == 16

    def drop() -> None:
        while losses:
            try:
                losses.pop()
            except IndexError:
                return

    threads = [threading.Thread(target=drop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_clean(executor)
    assert executor.flow.forwards == 32 and executor.flow.waiting == 0


@alphas
def test_outside_memory_written_in_a_region_does_not_keep_graphs_alive(alpha: float) -> None:
    """Write in place to memory from outside: the memory joins a graph, which holds the region's tensors."""
    memory = torch.zeros(2, 6, 16)

    class Writes(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * memory
            memory.copy_(y)
            return x + self.out(self.inner(memory).sigmoid())

    model = Stack(1, Writes)
    executor = tokenwise(model, alpha)
    with no_garbage_collection():
        loss = model(torch.randn(2, 6, 16))
        loss.backward()
        del loss
        memory = torch.zeros(2, 6, 16)
        assert_clean(executor)


@alphas
def test_hooks_that_outlive_their_forward_do_not_keep_graphs_alive(alpha: float) -> None:
    """Keep a region's saved-tensor hooks, as torch does when it copies a thread's state, such as for a collective."""
    hooks = []

    class Copies(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hooks.append(torch._C._autograd._top_saved_tensors_default_hooks(False))
            return x + self.out(self.inner(x).sigmoid())

    model = Stack(1, Copies)
    executor = tokenwise(model, alpha)
    with no_garbage_collection():
        for _ in range(2):
            model(torch.randn(2, 6, 16)).backward()
        assert_clean(executor)
    assert len(hooks) == 2 and all(hooks)


@alphas
def test_concurrent_forwards_have_separate_tapes(alpha: float) -> None:
    torch.manual_seed(0)
    model = Stack(3)
    reference = twin(model)
    executor = tokenwise(model, alpha)
    inputs = torch.randn(2, 4, 2, 6, 16)
    losses: list[list[torch.Tensor]] = [[], []]

    def forward(index: int) -> None:
        torch.set_grad_enabled(True)
        losses[index] = [model(x) for x in inputs[index]]

    threads = [threading.Thread(target=forward, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sum(losses[0] + losses[1]).backward()
    sum(reference(x) for part in inputs for x in part).backward()
    assert_same(gradients(model), gradients(reference), exact=False)
    losses.clear()
    del threads
    assert_clean(executor)


@alphas
@pytest.mark.parametrize("shared", [False, True])
def test_gradients_hold_while_threads_train_concurrently(alpha: float, shared: bool) -> None:
    """Run backwards and recompute passes on three threads, with one shared model or with a model for each."""
    torch.manual_seed(0)
    models = [Stack(3) for _ in range(1 if shared else 3)]
    references = [twin(model) for model in models]
    executors = [tokenwise(model, alpha) for model in models]
    inputs = torch.randn(3, 8, 2, 32, 16)
    start = threading.Barrier(3)
    errors: list[BaseException] = []

    def train(index: int) -> None:
        torch.set_grad_enabled(True)
        start.wait()
        try:
            for x in inputs[index]:
                models[index % len(models)](x).backward()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    for index, part in enumerate(inputs):
        for x in part:
            references[index % len(models)](x).backward()
    for model, reference, executor in zip(models, references, executors, strict=True):
        assert_same(gradients(model), gradients(reference), exact=False)
        assert_clean(executor)


@alphas
def test_overlapping_regions_on_threads_reenable_the_compiler(alpha: float) -> None:
    """Regions disable the compiler; expect the second thread to enable it again.

    The thread that enters its region first also leaves first, so the second thread finds the compiler disabled.
    """
    compiled_calls: list[int] = []
    first_is_inside, second_is_inside, first_is_over = (threading.Event() for _ in range(3))

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        compiled_calls.append(len(compiled_calls))
        return graph.forward

    @torch.compile(backend=backend)
    def activation(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    class Overlaps(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mine, others = (first_is_inside, second_is_inside) if x.shape[0] == 1 else (second_is_inside, first_is_over)
            mine.set()
            assert others.wait(timeout=20)
            return x + self.out(activation(self.inner(x)))

    model = Stack(1, Overlaps)
    tokenwise(model, alpha)

    one = torch.randn(1, 6, 16)  # made here, since other threads have another default device

    def first() -> None:
        model(one)
        first_is_over.set()

    thread = threading.Thread(target=first)
    thread.start()
    assert first_is_inside.wait(timeout=20)
    model(torch.randn(2, 6, 16))
    thread.join()
    assert not compiled_calls, "the function runs uncompiled inside a region"
    activation(torch.randn(3))
    assert len(compiled_calls) == 1, "the function runs compiled again after the regions"
    torch.compiler.reset()


@pytest.mark.cpu("no process uses CUDA after a fork")
def test_both_processes_of_a_fork_continue_graphs_in_flight() -> None:
    """Run in a fresh process: once autograd has had threads, torch runs no backward after a fork."""
    launch_forked([__name__], processes=1, module=True)


def fork(alpha: float) -> None:
    """Fork while graphs are in flight, and go on training in both processes; raise if one of them fails."""
    torch.manual_seed(0)
    model = Stack(4)
    reference = twin(model)
    executor = tokenwise(model, alpha)
    train_stacks(model, reference, 0, exact=alpha in (0, 1))
    x = torch.randn(2, 6, 16)
    loss, expected = model(x), reference(x)

    def go_on(seed: int) -> None:
        nonlocal loss
        train_stacks(model, reference, seed, exact=alpha in (0, 1))
        loss.backward()
        expected.backward()
        assert_same(gradients(model), gradients(reference), exact=alpha in (0, 1))
        del loss
        train_stacks(model, reference, seed + 1, exact=alpha in (0, 1))
        assert_clean(executor)

    child = os.fork()
    if not child:
        try:
            go_on(1)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    go_on(3)


def main() -> None:
    """Run `fork` for each alpha; this is the program of the fresh process."""
    for alpha in (0.0, 0.4, 1.0):
        fork(alpha)
