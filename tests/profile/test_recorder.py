"""The recorder's sequence has the operators that torch's profiler sees on the training thread and in backwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import nn

from memplug.profile.recorder import Detail, Recorder
from memplug.profile.trace import Fingerprint
from memplug.tokenwise.engine.core import in_framework
from tests.support.recording import (
    in_thread,
    nested,
    nothing_left,
    operator_names,
    profiled_operators,
    record,
    recorder,
    sequence,
    trainer,
    without_accumulation,
)

__all__ = ["nothing_left", "recorder"]
pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.device]


# -- which operators ---------------------------------------------------------------------------------------------------


@pytest.mark.cpu("the profiler knows its operators by other names")
def test_recorded_operators_match_the_profilers_in_order(recorder: Recorder) -> None:
    step = trainer()
    seen = operator_names(record(recorder, step))
    assert seen == profiled_operators(step)
    assert {"aten::addmm", "aten::native_layer_norm_backward", "aten::addcdiv_"} <= set(seen)  # from all three passes


def test_sequence_matches_forward_and_backward_of_the_profiler(recorder: Recorder) -> None:
    # the sequence leaves out the optimizer, all else that runs without gradients, and the accumulation of gradients
    step, passes = trainer(), trainer(optimizes=False)
    seen = sequence(recorder, step)
    assert seen == sequence(recorder, passes) == without_accumulation(profiled_operators(passes))
    assert {"aten::addmm", "aten::native_layer_norm_backward"} <= set(seen) and "aten::addcdiv_" not in seen


def test_sequence_includes_no_grad_operators_only_inside_a_backward(recorder: Recorder) -> None:
    x = torch.ones(3, requires_grad=True)

    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.cosh()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            assert not torch.is_grad_enabled()
            return gradient.sinh()

    def step() -> None:
        with torch.no_grad():
            x.sin()
        with torch.inference_mode():
            x.cos()
        y = Doubles.apply(x.exp()).sum()
        y.backward()

    seen = sequence(recorder, step)
    assert "aten::exp" in seen and "aten::sinh" in seen
    assert not {"aten::sin", "aten::cos"} & set(seen)
    assert {"aten::sin", "aten::cos"} <= set(operator_names(record(recorder, step))), "a trace has all of it"


def test_sequence_of_custom_function_and_checkpoint_matches_the_profiler(recorder: Recorder) -> None:
    def step() -> None:
        x = torch.ones(3, requires_grad=True)
        y = torch.utils.checkpoint.checkpoint(torch.erf, nested(0, x.cos) * x, use_reentrant=False)
        y.sum().backward()

    step()
    assert operator_names(record(recorder, step)) == profiled_operators(step)


@pytest.mark.parametrize("detail", Detail)
def test_sequence_stays_the_same_while_a_step_is_recorded(recorder: Recorder, detail: Detail) -> None:
    step = trainer(optimizes=False)
    expected = sequence(recorder, step)
    recorder.take()
    trace = record(recorder, step, detail)
    names = recorder.names
    assert [names[number] for number in recorder.take()] == expected == without_accumulation(operator_names(trace))


def test_equal_steps_have_equal_sequences_and_steps_of_more_layers_longer(recorder: Recorder) -> None:
    small, large = trainer(layers=2), trainer(layers=3)
    first = sequence(recorder, small)
    assert sequence(recorder, small) == first
    assert len(sequence(recorder, large)) > len(first)
    assert sequence(recorder, small) == first


def test_overloads_of_one_name_have_their_own_numbers(recorder: Recorder) -> None:
    x = torch.ones(2)
    recorder.take()
    x.add(1), x.add(x), x.sum(), x.sum(0)
    numbers = recorder.take()
    named = [recorder.names[number] for number in numbers]
    assert len({number for number, name in zip(numbers, named, strict=True) if name == "aten::sum"}) == 1
    assert {"aten::add.Tensor", "aten::sum", "aten::sum.dim_IntList"} <= set(named)
    assert len(set(recorder.names)) == len(recorder.names)


def test_take_empties_the_sequence(recorder: Recorder) -> None:
    x = torch.ones(2)
    recorder.take()
    x.exp()
    assert len(recorder.take()) == 1
    assert len(recorder.take()) == 0


def test_operators_are_seen_only_while_watched(recorder: Recorder) -> None:
    x = torch.ones(2)
    recorder.watch(False)
    x.exp()
    assert recorder.take() is None
    recorder.watch(False)
    recorder.watch(True)
    assert sequence(recorder, x.exp) == ["aten::exp"]
    recorder.watch(True)
    assert sequence(recorder, x.exp) == ["aten::exp"]


def test_after_a_recording_operators_are_watched_as_before_or_as_last_set(recorder: Recorder) -> None:
    x = torch.ones(2)
    for before, inside, after in [(True, None, True), (False, None, False), (True, False, False), (False, True, True)]:
        recorder.watch(before)
        recorder.take()
        recorder.begin(Detail.REQUESTS)
        if inside is not None:
            recorder.watch(inside)
        x.exp()
        assert len(recorder.take()) == 1
        assert operator_names(recorder.end(Fingerprint(), ())) == ["aten::exp"]
        x.exp()
        numbers = recorder.take()
        assert numbers is None if not after else [recorder.names[number] for number in numbers] == ["aten::exp"]


# -- a framework's own -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 64])
def test_gradient_hooks_are_no_part_of_the_sequence(recorder: Recorder, ranks: int) -> None:
    # frameworks partition gradients in hooks, in loops over ranks, and in callbacks after a backward
    x = torch.ones(3, requires_grad=True)

    def partition(parameter: torch.Tensor) -> None:
        parts = [parameter.grad.sinh() for _ in range(ranks)]
        torch.autograd.Variable._execution_engine.queue_callback(lambda: [part.cosh() for part in parts])

    def step() -> None:
        x.grad = None
        x.exp().sum().backward()

    plain = sequence(recorder, step)
    hook = x.register_post_accumulate_grad_hook(partition)
    assert sequence(recorder, step) == plain and "aten::exp" in plain and "aten::mul.Tensor" in plain
    hook.remove()


def test_framework_gathers_are_no_part_of_the_sequence(recorder: Recorder) -> None:
    class Gathers(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.detach()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            with in_framework(), in_framework():
                gradient.sinh()
            return gradient.cosh()

    def step() -> None:
        x = torch.ones(3, requires_grad=True)
        with contextlib.suppress(KeyError), in_framework():
            x.sin()
            raise KeyError
        Gathers.apply(x.exp()).sum().backward()

    seen = sequence(recorder, step)
    assert "aten::exp" in seen and "aten::cosh" in seen and not {"aten::sin", "aten::sinh"} & set(seen)
    assert {"aten::sin", "aten::sinh"} <= set(operator_names(record(recorder, step))), "a trace has all of it"


# -- suspended ---------------------------------------------------------------------------------------------------------


def test_suspended_operators_are_not_in_the_sequence(recorder: Recorder) -> None:
    x = torch.ones(2)

    def step() -> None:
        x.exp()
        with recorder.suspended:
            x.sin()
            with recorder.suspended:
                x.cos()
            x.tan()
        x.erf()
        with contextlib.suppress(KeyError), recorder.suspended:
            raise KeyError
        x.neg()

    assert sequence(recorder, step) == ["aten::exp", "aten::erf", "aten::neg"]
    whole = ["aten::exp", "aten::sin", "aten::cos", "aten::tan", "aten::erf", "aten::neg"]
    assert operator_names(record(recorder, step)) == whole
    assert [recorder.names[number] for number in recorder.take()] == ["aten::exp", "aten::erf", "aten::neg"]


def test_suspension_in_a_backward_hides_only_the_suspended_operators(recorder: Recorder) -> None:
    def own(gradient: torch.Tensor) -> None:
        with recorder.suspended:
            gradient.sin()

    def step(hook: Callable[[torch.Tensor], None]) -> None:
        y = torch.ones(2, requires_grad=True).exp()
        y.register_hook(hook)
        y.sum().backward()

    assert "aten::sin" in sequence(recorder, lambda: step(torch.sin))
    assert sequence(recorder, lambda: step(own)) == sequence(recorder, lambda: step(lambda gradient: None))


# -- nodes -------------------------------------------------------------------------------------------------------------


def test_node_count_is_the_number_of_autograd_nodes_made_by_forwards(recorder: Recorder) -> None:
    x = torch.ones(2, requires_grad=True)
    recorder.take_nodes()
    x.exp().sin()
    assert recorder.take_nodes() == 2
    assert recorder.take_nodes() == 0
    with torch.no_grad():
        x.exp().sin()
    in_thread(x.exp)
    assert recorder.take_nodes() == 0


def test_equal_steps_have_equal_node_counts_watched_or_not(recorder: Recorder) -> None:
    def nodes(step: Callable[[], None]) -> int:
        recorder.take_nodes()
        step()
        return recorder.take_nodes()

    small, large = trainer(layers=2), trainer(layers=3)
    counted = nodes(small)
    recorder.watch(False)
    assert nodes(small) == counted > 0
    assert nodes(large) > counted
    recorder.watch(True)
    record(recorder, small)
    assert nodes(small) == counted


def test_nodes_made_while_suspended_do_not_count(recorder: Recorder) -> None:
    x = torch.ones(2, requires_grad=True)
    recorder.take_nodes()
    x.exp()
    with recorder.suspended:
        nn.Linear(2, 2)(x).exp()
        with recorder.suspended:
            x.sin()
        x.cos()
    x.exp()
    with contextlib.suppress(KeyError), recorder.suspended:
        x.sin()
        raise KeyError
    assert recorder.take_nodes() == 2
