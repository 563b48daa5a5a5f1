"""What a recompute pass must do with each operator follows from the tape of one forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memplug.execute.tape import Action, Form, Tape

RUN, SUBSTITUTE, SKIP = Action.RUN, Action.SUBSTITUTE, Action.SKIP


class Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.tape = Tape()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.tape.add(func, args, kwargs or {}, out)
        return out


def record(call: Callable[..., Any], *args: Any) -> Tape:
    """The tape of `call(*args)`, whose returned tensors backward asks for."""
    with Recording() as recording:
        saved = call(*args)
    for tensor in saved:
        recording.tape.saved.add(recording.tape.number(tensor))
    recording.tape.close()
    return recording.tape


def names(tape: Tape) -> list[str]:
    return [record.func._schema.name.partition("::")[2] for record in tape.records]


def plan(call: Callable[..., Any], captured: dict[str, bool] | None = None) -> list[tuple[str, Action]]:
    """Operators and actions; `captured` by operator name."""
    tape = record(call, torch.randn(4, 4), torch.randn(4, 4))
    by_index = {i: (captured or {})[name] for i, name in enumerate(names(tape)) if name in (captured or {})}
    return list(zip(names(tape), tape.actions(by_index), strict=True))


def test_an_operator_runs_only_if_something_saved_depends_on_it() -> None:
    assert plan(lambda x, w: [(x.sin(), x.cos().exp())[1]]) == [("sin", SKIP), ("cos", RUN), ("exp", RUN)]


def test_nothing_runs_where_nothing_is_saved() -> None:
    assert plan(lambda x, w: (x.sin().exp(), ())[1]) == [("sin", SKIP), ("exp", SKIP)]


def test_a_captured_output_cuts_off_what_is_before_it() -> None:
    assert plan(lambda x, w: [(x.sin() @ w).exp()], {"mm": True}) == [("sin", SKIP), ("mm", SUBSTITUTE), ("exp", RUN)]


def test_the_rows_that_are_missing_need_the_inputs() -> None:
    assert plan(lambda x, w: [(x.sin() @ w).exp()], {"mm": False}) == [("sin", RUN), ("mm", SUBSTITUTE), ("exp", RUN)]


def test_a_captured_output_that_nobody_reads_is_not_fetched() -> None:
    assert plan(lambda x, w: [((x @ w).exp(), x.sin())[1]], {"mm": True}) == [("mm", SKIP), ("exp", SKIP), ("sin", RUN)]


def test_writes_to_what_is_saved_run_and_other_writes_do_not() -> None:
    def call(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        y, z = x.sin(), x.cos()
        y.add_(1)
        z.mul_(2)
        return [y]

    assert plan(call) == [("sin", RUN), ("cos", SKIP), ("add_", RUN), ("mul_", SKIP)]


def test_a_write_through_a_view_counts_for_the_whole_storage() -> None:
    def call(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        y = torch.zeros(4, 4)
        y[1].copy_(w[0])
        return [y.t()]

    actions = dict(plan(call))
    assert actions["zeros"] is RUN and actions["copy_"] is RUN


def test_a_write_to_a_captured_output_runs_on_the_substitute() -> None:
    def call(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        return [(x.sin() @ w).relu_()]

    assert plan(call, {"mm": True}) == [("sin", SKIP), ("mm", SUBSTITUTE), ("relu_", RUN)]


def test_a_write_to_given_memory_always_runs() -> None:
    assert plan(lambda x, w: (w.add_(x.sin()), ())[1]) == [("sin", RUN), ("add_", RUN)]


def test_draws_run_always_and_their_readers_only_when_needed() -> None:
    def call(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        mask = torch.empty_like(x).bernoulli_(0.5)
        x.sin() * mask
        return [torch.rand(3)]

    assert plan(call) == [("empty_like", SKIP), ("bernoulli_", RUN), ("sin", SKIP), ("mul", SKIP), ("rand", RUN)]


def test_a_number_that_python_saw_is_not_computed_again() -> None:
    tape = record(lambda x, w: [x * (w.sin().sum().item() > 0)], torch.randn(4, 4), torch.ones(4, 4))
    index = names(tape).index("_local_scalar_dense")
    assert tape.records[index].form is Form.VALUE
    assert tape.records[index].shapes == [pytest.approx(float(torch.ones(4, 4).sin().sum()))]
    assert tape.actions({})[: index + 1] == [SKIP] * (index + 1)


def test_memory_that_nobody_was_seen_to_fill_makes_everything_run() -> None:
    def filled_unseen(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        x.sin()
        return [torch.empty(4, 4)]

    def filled(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        x.sin()
        return [torch.empty(4, 4).copy_(w)]

    assert plan(filled_unseen) == [("sin", RUN), ("empty", RUN)]
    assert plan(filled) == [("sin", SKIP), ("empty", RUN), ("copy_", RUN)]


def test_an_opaque_forward_takes_captured_outputs_and_runs_everything_else() -> None:
    tape = record(lambda x, w: [(x.sin() @ w).exp()], torch.randn(4, 4), torch.randn(4, 4))
    tape.opaque = True
    assert tape.actions({1: True}) == [RUN, SUBSTITUTE, RUN]


def test_a_storage_at_a_reused_address_is_another_storage() -> None:
    def call(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        for _ in range(50):
            y = x.sin()
            del y
        return [x.cos()]

    assert [action for _, action in plan(call)] == [SKIP] * 50 + [RUN]


def test_views_run_since_they_cost_nothing() -> None:
    assert plan(lambda x, w: (x.t().view(-1, 2) if False else x.t()[1:], ())[1]) == [("t", RUN), ("slice", RUN)]
