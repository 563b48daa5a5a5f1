"""The kind of an operator decides how it is captured.

The last rows of an operator, computed alone, equal those of a full run.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import nn

from memplug.tokenwise.engine import operators
from memplug.tokenwise.engine.core import core
from memplug.tokenwise.engine.operators import CaptureKind, kind_of
from memplug.tokenwise.engine.tape import records_of
from tests.support.blocks import Layer, Stack, assert_clean, assert_same, gradients, tokenwise, train_alike, twin
from tests.support.counting import Launches
from tests.support.native_forward import Keeps, Run
from tests.support.parallel import Parallel, Reduce

pytestmark = pytest.mark.device

aten = torch.ops.aten

# -- the last rows ---------------------------------------------------------------------------------------------------


def cases() -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Return calls of every row-wise operator, with 12 rows (bmm: batch elements)."""
    generator = torch.Generator().manual_seed(0)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    a, b, batched, other = randn(12, 8), randn(8, 6), randn(12, 3, 8), randn(12, 8, 6)
    groups, offs = randn(3, 8, 8), torch.tensor([5, 5, 12], dtype=torch.int32)
    return {
        "mm": (aten.mm.default, (a, b), {}),
        "mm of a transposed matrix": (aten.mm.default, (randn(8, 12).t(), randn(6, 8).t()), {}),
        "addmm, bias of columns": (aten.addmm.default, (randn(6), a, b), {}),
        "addmm, scalar bias": (aten.addmm.default, (randn(1).squeeze(), a, b), {}),
        "addmm, bias of one row": (aten.addmm.default, (randn(1, 6), a, b), {}),
        "addmm, bias of rows": (aten.addmm.default, (randn(12, 1), a, b), {}),
        "addmm, full bias, beta and alpha": (aten.addmm.default, (randn(12, 6), a, b), {"beta": 0.5, "alpha": 2.0}),
        "addmm, bias ignored": (aten.addmm.default, (torch.full((12, 6), float("nan")), a, b), {"beta": 0}),
        "bmm": (aten.bmm.default, (batched, other), {}),
        "baddbmm, full bias": (aten.baddbmm.default, (randn(12, 3, 6), batched, other), {"beta": 0.5, "alpha": 2.0}),
        "baddbmm, one bias for all": (aten.baddbmm.default, (randn(1, 3, 6), batched, other), {}),
        "baddbmm, bias of columns": (aten.baddbmm.default, (randn(6), batched, other), {}),
        "baddbmm, matrix bias": (aten.baddbmm.default, (randn(3, 6), batched, other), {}),
        "grouped mm": (aten._grouped_mm.default, (a, groups, offs), {}),
        "grouped mm, offsets by name": (aten._grouped_mm.default, (a, groups), {"offs": offs}),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("start", [0, 1, 5, 11, 12])
@pytest.mark.parametrize("name", cases())
def test_recomputed_rows_equal_a_full_run_and_captured_rows_are_unchanged(
    name: str, start: int, dtype: torch.dtype
) -> None:
    func, args, kwargs = cases()[name]
    args = tuple(a.to(dtype) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)
    whole = func(*args, **kwargs)
    out, one = torch.full_like(whole, -7), torch.ones((), requires_grad=True)

    def call() -> torch.Tensor:
        return Keeps.apply(one, func(*args, **kwargs))

    run = Run(core(), call)
    (restored,) = run.restored({0: False}, lambda index: ([out], start)).values()
    assert (restored[:start] == -7).all()
    torch.testing.assert_close(restored[start:], whole[start:])


def test_gradients_hold_with_grouped_matmul_over_tokens_at_any_alpha() -> None:
    class Weighs(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, offs = self.inner(self.norm(x)).flatten(0, 1), torch.tensor([4, 12], dtype=torch.int32, device=x.device)
            weights = torch._grouped_mm(y.t(), y.sigmoid(), offs=offs)
            return x + self.out(self.norm(x) @ weights.tanh().sum(0)[:16, :].contiguous())

    for alpha in (0.0, 0.3, 0.7, 1.0):
        train_alike(Weighs, alpha, steps=3)


# -- kinds -----------------------------------------------------------------------------------------------------------

KINDS = {
    CaptureKind.ROWS: ["mm", "addmm", "bmm", "baddbmm", "_grouped_mm"],
    CaptureKind.ATTENTION: [
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "_flash_attention_forward",
        "_efficient_attention_forward",
        "_cudnn_attention_forward",
    ],
    CaptureKind.CHOICE: ["topk", "sort", "argsort", "argmax", "argmin", "multinomial", "nonzero", "_unique2"],
    None: [
        "add.Tensor",
        "detach_",
        "mul.Tensor",
        "silu",
        "_softmax",
        "native_layer_norm",
        "max",
        "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_efficient_attention_backward",
        "_flash_attention_backward",
        "mm.out",
        "addmm.out",
        "topk.values",
        "addmm_",
    ],
}


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for kind, names in KINDS.items() for name in names])
def test_each_operator_has_its_expected_capture_kind(name: str, kind: CaptureKind | None) -> None:
    packet, _, overload = name.partition(".")
    assert hasattr(aten, packet), f"this torch has no aten::{packet}"
    assert kind_of(getattr(getattr(aten, packet), overload or "default")) is kind


def test_max_and_min_are_captured_as_choices_only_along_a_dimension() -> None:
    assert kind_of(aten.max.dim) is kind_of(aten.min.dim) is CaptureKind.CHOICE
    assert kind_of(aten.max.default) is kind_of(aten.max.other) is None


def test_functional_collectives_are_captured_at_their_wait() -> None:
    assert kind_of(torch.ops._c10d_functional.wait_tensor.default) is CaptureKind.COLLECTIVE
    assert kind_of(torch.ops._c10d_functional.all_reduce.default) is None
    assert operators.is_communication(torch.ops._c10d_functional.all_reduce.default)


LIBRARY = torch.library.Library("memplug_test_operators", "DEF")
LIBRARY.define("attend(Tensor q, float dropout_p=0.) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
LIBRARY.impl("attend", lambda q, dropout_p=0.0: q.clone(), "CompositeExplicitAutograd")


def test_attention_draws_random_numbers_only_with_dropout() -> None:
    q, attend = torch.randn(1, 1, 2, 4), torch.ops.memplug_test_operators.attend
    run = Run(core(), lambda: (attend(q, 0.1), attend(q, 0.0), attend(q), torch.rand(2)))
    assert [record.draws for record in records_of(run.tape)] == [True, False, False, True]


# -- attention and collectives of other libraries --------------------------------------------------------------------


class FlashAttention(torch.autograd.Function):
    """Attention like flash-attn's: a registered operator in a function that saves the tensors for backward."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse, _, _ = torch.ops.flash_attn._flash_attn_forward(q, k, v, 0.0)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        p = torch.exp(q @ k.mT - lse[..., None])
        ds = p * (gradient @ v.mT - (gradient * out).sum(-1, keepdim=True))
        return ds @ k, ds.mT @ q, p.mT @ gradient


@pytest.fixture
def flash_calls() -> Iterator[collections.Counter[str]]:
    calls: collections.Counter[str] = collections.Counter()
    with torch.library._scoped_library("flash_attn", "FRAGMENT") as library:
        library.define(
            "_flash_attn_forward(Tensor q, Tensor k, Tensor v, float dropout_p) -> (Tensor, Tensor, Tensor, Tensor)"
        )
        library.define("_flash_attn_backward(Tensor dout, Tensor q) -> Tensor")

        def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float) -> tuple[torch.Tensor, ...]:
            calls["forward"] += 1
            scores = q @ k.mT
            lse = scores.logsumexp(-1)
            return (scores - lse[..., None]).exp() @ v, lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64)

        library.impl("_flash_attn_forward", forward, "CPU")
        library.impl("_flash_attn_forward", forward, "CUDA")
        yield calls


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_registered_flash_attention_is_captured_and_runs_once(
    alpha: float, flash_calls: collections.Counter[str]
) -> None:
    class Attends(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.out(self.inner(FlashAttention.apply(*self.qkv(self.norm(x)).chunk(3, -1))).sigmoid())

    kind_of.cache_clear()
    assert kind_of(torch.ops.flash_attn._flash_attn_forward.default) is CaptureKind.ATTENTION
    assert kind_of(torch.ops.flash_attn._flash_attn_backward.default) is None
    train_alike(Attends, alpha, steps=3)
    assert flash_calls["forward"] == 2 * 3 * 3  # two models, three layers, three steps
    kind_of.cache_clear()


class FlashAttention3(FlashAttention):
    """Attention like flash-attn 3's: its operator allocates the result, or writes to a tensor of the caller's."""

    has_memory = False

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        memory = torch.empty_like(q) if FlashAttention3.has_memory else None
        out, lse, _, _ = torch.ops.flash_attn_3.fwd(q, k, v, None, memory)
        ctx.save_for_backward(q, k, v, out, lse)
        return out


@pytest.fixture
def flash_3_calls() -> Iterator[collections.Counter[str]]:
    calls: collections.Counter[str] = collections.Counter()
    with torch.library._scoped_library("flash_attn_3", "FRAGMENT") as library:
        given = "Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(out!)? out=None"
        library.define(f"fwd({given}) -> (Tensor(out!), Tensor, Tensor, Tensor)")
        library.define("bwd(Tensor dout, Tensor q, Tensor(dq!)? dq=None) -> (Tensor, Tensor)")
        library.define("fwd_combine(Tensor partial, Tensor(out!)? out=None) -> (Tensor(out!), Tensor)")

        def fwd(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_new: Any = None, out: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, ...]:
            calls["forward"] += 1
            scores = q @ k.mT
            lse = scores.logsumexp(-1)
            made = (scores - lse[..., None]).exp() @ v
            out = made if out is None else out.copy_(made)
            return out, lse, q.new_empty(0), q.new_empty(0)

        library.impl("fwd", fwd, "CPU")
        library.impl("fwd", fwd, "CUDA")
        kind_of.cache_clear()
        yield calls
        kind_of.cache_clear()


@pytest.mark.parametrize("has_memory", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_flash_attention_3_is_captured_unless_the_caller_passes_out(
    alpha: float, has_memory: bool, flash_3_calls: collections.Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FlashAttention3, "has_memory", has_memory)

    class Attends(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.out(self.inner(FlashAttention3.apply(*self.qkv(self.norm(x)).chunk(3, -1))).sigmoid())

    assert kind_of(torch.ops.flash_attn_3.fwd.default) is CaptureKind.ATTENTION
    assert kind_of(torch.ops.flash_attn_3.bwd.default) is None
    executor = train_alike(Attends, alpha, steps=3)
    assert executor.opaque_regions == 0
    # three layers, three steps; forwards of the twin and the model, and for `has_memory` the recompute pass
    assert flash_3_calls["forward"] == 3 * 3 * (3 if has_memory else 2)


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_collectives_are_not_launched_again_in_any_step(alpha: float, small: bool, group: Any) -> None:
    torch.manual_seed(0)
    model = Stack(3, Parallel)
    reference = twin(model)
    executor = tokenwise(model, alpha, **({"min_offload_bytes": 1 << 30} if small else {}))
    for x in torch.randn(4, 2, 6, 16):
        loss = model(x)
        with Launches(operators.is_communication) as launches:
            loss.backward()
        assert not launches.calls
        reference(x).backward()
        assert_same(gradients(model), gradients(reference), exact=alpha != 0.3)
        del loss
    assert_clean(executor)


@pytest.mark.parametrize("budget_bytes", [0, 2000, 8000])
def test_collectives_are_not_launched_again_on_a_full_host(budget_bytes: int, group: Any) -> None:
    model = Stack(3, Parallel)
    executor = tokenwise(model, 0.5, host_budget_bytes=budget_bytes)
    for x in torch.randn(3, 2, 6, 16):
        loss = model(x)
        with Launches(operators.is_communication) as launches:
            loss.backward()
        assert not launches.calls
        del loss
    assert executor.transfer.refused
    assert_clean(executor)


def test_gradients_hold_with_a_coalesced_collective(group: Any) -> None:
    class Coalesces(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(self.norm(x))
            with torch.no_grad():
                total, count = functional_collectives.all_reduce_coalesced([y.detach(), x.detach()], "sum", group)
            return x + self.out((y * total.exp()).tanh()) + (x * count).sigmoid()

    for alpha in (0.0, 0.3, 1.0):
        train_alike(Coalesces, alpha, steps=3)


def test_collective_newly_needed_by_backward_runs_again_only_once(group: Any) -> None:
    class Changes(Layer):
        saves = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = Reduce.apply(self.out(self.inner(x)), dist.group.WORLD)
            return x + (y.sigmoid() if self.saves else y * 2)

    torch.manual_seed(0)
    model = Stack(2, Changes)
    reference = twin(model)
    tokenwise(model, 0.0)
    launched = []
    for step, x in enumerate(torch.randn(5, 2, 6, 16)):
        for network in (model, reference):
            for layer in network.layers:
                layer.saves = step >= 2
        loss = model(x)
        with Launches(operators.is_communication) as launches:
            loss.backward()
        launched.append(launches.calls["all_reduce"])
        reference(x).backward()
        assert_same(gradients(model), gradients(reference))
    assert launched == [0, 0, 2, 0, 0]
