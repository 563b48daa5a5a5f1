"""A recompute pass runs, substitutes or skips each operator, as the native tape of its forward implies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memplug.tokenwise.engine.core import core
from memplug.tokenwise.engine.tape import Form, records_of
from tests.support.native_forward import Keeps, Run

RUN, SUBSTITUTE, SKIP = range(3)


def record(call: Callable[..., Any], *args: Any) -> Run:
    """Record the forward of `call(*args)`; autograd saves all of its results for backward."""
    one = torch.ones((), requires_grad=True)
    return Run(core(), lambda: Keeps.apply(one, *call(*args)))


def names(run: Run) -> list[str]:
    """Return the names of all operators but the last one, which keeps the returned tensors."""
    return [record.func._schema.name.partition("::")[2] for record in records_of(run.tape)][:-1]


def actions(run: Run, captured: dict[int, bool]) -> list[int]:
    run.forward.decide(captured, [])
    return run.forward.actions[:-1]


def plan(call: Callable[..., Any], captured: dict[str, bool] | None = None) -> list[tuple[str, int]]:
    """Return each operator with its action; `captured` says by operator name whether a capture has all rows."""
    run = record(call, torch.randn(4, 4), torch.randn(4, 4))
    by_index = {i: (captured or {})[name] for i, name in enumerate(names(run)) if name in (captured or {})}
    return list(zip(names(run), actions(run, by_index), strict=True))


def test_operator_runs_only_if_a_saved_tensor_depends_on_it() -> None:
    assert plan(lambda x, w: [(x.sin(), x.cos().exp())[1]]) == [("sin", SKIP), ("cos", RUN), ("exp", RUN)]


def test_no_operator_runs_again_if_no_tensor_is_saved() -> None:
    assert plan(lambda x, w: (x.sin().exp(), ())[1]) == [("sin", SKIP), ("exp", SKIP)]


def test_operators_before_a_captured_output_are_skipped() -> None:
    assert plan(lambda x, w: [(x.sin() @ w).exp()], {"mm": True}) == [("sin", SKIP), ("mm", SUBSTITUTE), ("exp", RUN)]


def test_inputs_of_a_partly_captured_output_are_recomputed() -> None:
    assert plan(lambda x, w: [(x.sin() @ w).exp()], {"mm": False}) == [("sin", RUN), ("mm", SUBSTITUTE), ("exp", RUN)]


def test_unread_captured_output_is_not_prefetched() -> None:
    assert plan(lambda x, w: [((x @ w).exp(), x.sin())[1]], {"mm": True}) == [("mm", SKIP), ("exp", SKIP), ("sin", RUN)]


def test_in_place_writes_run_again_only_for_saved_storages() -> None:
    def call(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        y, z = x.sin(), x.cos()
        y.add_(1)
        z.mul_(2)
        return [y]

    assert plan(call) == [("sin", RUN), ("cos", SKIP), ("add_", RUN), ("mul_", SKIP)]


def test_write_through_a_view_counts_for_the_whole_storage() -> None:
    def call(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        y = torch.zeros(4, 4)
        y[1].copy_(w[0])
        return [y.t()]

    found = dict(plan(call))
    assert found["zeros"] == found["copy_"] == RUN


def test_write_to_a_captured_output_runs_on_the_substitute() -> None:
    def call(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        return [(x.sin() @ w).relu_()]

    assert plan(call, {"mm": True}) == [("sin", SKIP), ("mm", SUBSTITUTE), ("relu_", RUN)]


def test_write_to_memory_from_outside_always_runs() -> None:
    assert plan(lambda x, w: (w.add_(x.sin()), ())[1]) == [("sin", RUN), ("add_", RUN)]


def test_random_operators_run_only_if_their_numbers_are_needed() -> None:
    """Each draw has its own generator state, so skipping one does not change later ones."""

    def call(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        mask = torch.empty_like(x).bernoulli_(0.5)
        x.sin() * mask
        return [torch.rand(3)]

    assert plan(call) == [("empty_like", SKIP), ("bernoulli_", SKIP), ("sin", SKIP), ("mul", SKIP), ("rand", RUN)]


def test_scalar_read_by_python_is_not_computed_again() -> None:
    run = record(lambda x, w: [x * (w.sin().sum().item() > 0)], torch.randn(4, 4), torch.ones(4, 4))
    index = names(run).index("_local_scalar_dense")
    assert records_of(run.tape)[index].form is Form.VALUE
    assert actions(run, {}) == [SKIP] * (index + 1) + [RUN]


def test_unfilled_memory_makes_a_forward_opaque() -> None:
    x = torch.randn(4, 4)
    assert record(lambda: [torch.empty(4, 4)]).forward.opaque
    assert not record(lambda: [torch.empty(4, 4).copy_(x)]).forward.opaque
    assert not record(lambda: [torch.empty(0, 4)]).forward.opaque


def test_storage_at_a_reused_address_is_a_new_storage() -> None:
    def call(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        for _ in range(50):
            y = x.sin()
            del y
        return [x.cos()]

    assert [action for _, action in plan(call)] == [SKIP] * 50 + [RUN]


def test_recompute_pass_skips_views() -> None:
    assert plan(lambda x, w: [x.sin().t()[1:]]) == [("sin", RUN), ("t", SKIP), ("slice", SKIP)]


def test_other_tensors_are_restored_if_one_is_freed_during_the_pass() -> None:
    run = record(lambda x, w: [x.cos().exp(), (x @ w).exp(), x.sin()], torch.randn(4, 4), torch.randn(4, 4))
    product = names(run).index("mm")
    expected = [tensor.clone() for tensor in run.saved]
    first, *others = (i for i in range(len(run.saved)) if run.forward.has_to_restore(i))
    mm = torch.randn(4, 4)

    def substitute(index: int) -> tuple[list[torch.Tensor], int]:
        run.objects[first] = None
        return [mm], -1

    restored = run.restored({product: True}, substitute)
    assert list(restored) == others and len(others) == 2
    assert torch.equal(restored[others[0]], mm.exp()) and torch.equal(restored[others[1]], expected[others[1]])
