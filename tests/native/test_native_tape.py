"""The native tape equals the one that a Python dispatch mode records during the same forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from memplug.errors import RecomputeError
from memplug.tokenwise.engine import core as native
from memplug.tokenwise.engine.tape import records_of
from tests.support import forwards
from tests.support.blocks import Layer
from tests.support.compared_tapes import both, compare
from tests.support.native_forward import Run

KINDS = [
    kind
    for kind in vars(forwards).values()
    if isinstance(kind, type) and issubclass(kind, nn.Module) and kind is not Layer
]
# left out: layers that write to memory from outside (their frames keep its former values), and opaque ones
REPLAYED = [
    kind for kind in KINDS if kind.__name__ not in ("WritesInput", "Statistics", "Normalizes", "RunsInvisibleKernel")
]


@pytest.fixture(scope="module")
def core() -> Any:
    return native.core()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_native_tape_of_every_forward_equals_the_reference_tape(core: Any, kind: type[Layer]) -> None:
    torch.manual_seed(0)
    layer = kind()
    x = torch.randn(6, 4, 16, requires_grad=True)
    run, reference = both(core, lambda: layer(x * 1))
    assert reference.records
    compare(run.tape, reference)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_repeated_forward_follows_the_template(core: Any, kind: type[Layer]) -> None:
    torch.manual_seed(0)
    layer = kind()
    x = torch.randn(6, 4, 16)
    first, second = (Run(core, lambda: layer(x.requires_grad_() * 1)) for _ in range(2))
    third = Run(core, lambda: layer(x.requires_grad_() * 1), (first.tape,))
    alike = records_of(first.tape) == records_of(second.tape) and kind.__name__ != "AsksNumpy"
    assert third.follows == alike or kind.__name__ in ("AsksNumpy", "Statistics", "Normalizes", "RunsInvisibleKernel")
    assert third.follows == (third.tape is first.tape)
    assert records_of(third.tape) == records_of(second.tape)


CHANGES: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "a number": lambda x, turn: x * (1.5 + turn),
    "a keyword": lambda x, turn: x.sum(-1, keepdim=bool(turn)),
    "a size": lambda x, turn: x[: 3 + turn].exp(),
    "an operator": lambda x, turn: x.sin() if turn else x.cos(),
    "which tensor": lambda x, turn: (x.exp() + x, x.exp())[0] if turn else x + x,
    "a layout": lambda x, turn: (x.mT if turn else x).sigmoid(),
    "a dtype": lambda x, turn: x.to(torch.bfloat16 if turn else torch.float16),
    "one operator more": lambda x, turn: x.exp().exp() if turn else x.exp(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_different_forward_departs_from_the_template(core: Any, change: str) -> None:
    x = torch.randn(4, 4)
    first = Run(core, lambda: CHANGES[change](x.tanh(), 0))
    second = Run(core, lambda: CHANGES[change](x.tanh(), 1), (first.tape,))
    assert not second.follows
    alone = Run(core, lambda: CHANGES[change](x.tanh(), 1))
    assert records_of(second.tape) == records_of(alone.tape)
    both_known = (first.tape, alone.tape)
    assert Run(core, lambda: CHANGES[change](x.tanh(), 1), both_known).tape is alone.tape
    assert Run(core, lambda: CHANGES[change](x.tanh(), 0), both_known).tape is first.tape


def test_forward_that_saves_other_tensors_departs_from_the_template(core: Any) -> None:
    x = torch.randn(4, 4)
    first = Run(core, lambda: x.clone().requires_grad_() @ x)
    second = Run(core, lambda: x.clone() @ x, (first.tape,))
    assert not second.follows and len(second.saved) < len(first.saved)


def test_forward_with_one_operator_fewer_departs_from_the_template(core: Any) -> None:
    x = torch.randn(4, 4)
    first = Run(core, lambda: x.exp().sin())
    second = Run(core, lambda: x.exp(), (first.tape,))
    assert not second.follows and [str(r.func) for r in records_of(second.tape)] == ["aten.exp.default"]


@pytest.mark.parametrize("kind", REPLAYED, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("captured", ["nothing", "matmuls", "rows"])
def test_replay_restores_saved_tensors(core: Any, kind: type[Layer], captured: str) -> None:
    torch.manual_seed(0)
    layer = kind()
    x = torch.randn(6, 4, 16, requires_grad=True) * 1
    outputs = Outputs()
    with outputs:
        run = Run(core, lambda: layer(x))
    assert not run.forward.opaque & ~CHANGED  # CHANGED: torch resolves conjugates before calling `outputs`
    after = torch.get_rng_state()
    copies = outputs.of(run.tape) if captured != "nothing" else {}
    rows = {index: -1 if captured == "matmuls" else tensor.shape[0] // 2 for index, tensor in copies.items()}

    def substitute(index: int) -> tuple[list[torch.Tensor], int]:
        if rows[index] >= 0:
            copies[index][rows[index] :] = float("nan")
        return [copies[index]], rows[index]

    restored = run.restored({index: count < 0 for index, count in rows.items()}, substitute)
    assert torch.equal(torch.get_rng_state(), after)
    assert restored
    for index, ours in restored.items():
        theirs = run.saved[index].detach()
        assert ours.shape == theirs.shape and ours.stride() == theirs.stride() and ours.dtype == theirs.dtype
        if captured == "rows":  # a matmul of fewer rows, which kernels may round differently
            torch.testing.assert_close(ours, theirs)
        else:
            assert torch.equal(ours, theirs)
    for index in set(range(len(run.saved))) - set(restored):
        assert torch.equal(core.unpack(run.objects[index]), run.saved[index])


class Outputs(TorchDispatchMode):
    """Keeps a copy of the output of every matmul of a forward, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.matmuls: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name in MATMULS:
            self.matmuls.append(out.clone())
        return out

    def of(self, tape: Any) -> dict[int, torch.Tensor]:
        """Return the copies by index on the tape."""
        indices = [i for i, record in enumerate(records_of(tape)) if record.func._schema.name in MATMULS]
        return dict(zip(indices, self.matmuls, strict=True))


CHANGED = 1 << 9  # a bit of `Opaque` in memplug/tokenwise/native/tape/tape.h
MATMULS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}


class Drops(nn.Module):
    """Dropout of every kind: an operator that draws, memory filled with random numbers, and a separate generator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = torch.Generator().manual_seed(3)
        mask = torch.empty_like(x).bernoulli_(0.5, generator=own)
        y = F.dropout(x.sin(), 0.3) * torch.rand_like(x)
        return (y * mask).exp() * torch.randperm(x.shape[-1])


def test_replayed_random_operators_draw_the_same_numbers(core: Any) -> None:
    x = torch.randn(8, 8, requires_grad=True) * 1
    run = Run(core, lambda: Drops()(x))
    torch.rand(7)
    state = torch.get_rng_state()
    for _ in range(2):
        restored = run.restored({}, pytest.fail)
        assert restored
        for index, ours in restored.items():
            assert torch.equal(ours, run.saved[index].detach())
    assert torch.equal(torch.get_rng_state(), state)


def test_replay_runs_only_needed_operators(core: Any) -> None:
    x = torch.randn(4, 4)

    def call() -> torch.Tensor:
        y = x.sin()
        y.cos()
        z = (y @ y).tanh().requires_grad_()
        torch.rand(3)
        return z.sigmoid()

    run = Run(core, call)
    names = [record.func._schema.name for record in records_of(run.tape)]
    assert names == [f"aten::{name}" for name in ("sin", "cos", "mm", "tanh", "rand", "sigmoid")]
    for captured, expected in (({}, ["sin", "mm", "tanh", "sigmoid"]), ({2: True}, ["tanh", "sigmoid"])):
        with Ran() as ran:
            run.restored(captured, lambda index: ([x.sin() @ x.sin()], -1) if ran.pause() else None)
        assert ran.names == expected


class Ran(TorchDispatchMode):
    """Records the operators that ran, except the three after each pause."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.skip = 0

    def pause(self) -> bool:
        """Skip the next three operators, which are the test's own."""
        self.skip = 3
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.skip:
            self.skip -= 1
        else:
            self.names.append(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


def test_autocast_casts_are_separate_operators(core: Any) -> None:
    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        run, reference = both(core, lambda: (x @ weight).exp())
    compare(run.tape, reference)
    assert [record.func._schema.name for record in records_of(run.tape)].count("aten::_to_copy") == 2


def test_replay_raises_if_its_input_memory_was_freed(core: Any) -> None:
    weight = torch.randn(1000, 1000)
    run = Run(core, lambda: (torch.ones(1000, 1000).requires_grad_() @ weight).exp())
    weight.untyped_storage().resize_(0)
    with pytest.raises(RecomputeError, match="was freed or replaced"):
        run.restored({}, pytest.fail)


class Silent(torch.Tensor):
    """A sparse tensor subclass that raises in every operator."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError("it does not say")


def test_freeing_a_frame_does_not_query_the_sizes_of_its_tensors(core: Any) -> None:
    """An error in the frame's destructor would end the process."""
    run = Run(core, lambda: torch.ones(4).requires_grad_().exp())
    run.forward.restore(0, torch.ones(4))
    with pytest.raises(TypeError, match="does not say"):
        run.forward.restore(0, torch.Tensor._make_subclass(Silent, torch.eye(3).to_sparse()))
    assert run.forward.restored() == {}
    restored = torch.ones(4)
    run.forward.restore(0, restored)
    assert run.flow.recomputed_bytes == 16
    restored.resize_(100)
    run.forward.forget()
    assert run.flow.recomputed_bytes == 0


def test_recompute_pass_that_lacks_an_operators_input_raises_diverged(core: Any) -> None:
    run = Run(core, lambda: (torch.ones(4, 4).requires_grad_() @ torch.ones(4, 4)).exp())
    (matmul,) = [i for i, record in enumerate(records_of(run.tape)) if record.func._schema.name in MATMULS]
    with pytest.raises(core.Diverged, match="memory that an operator reads is missing"):
        run.restored({matmul: True}, lambda index: ([], -1))


def test_writing_to_an_outside_tensor_before_replay_raises(core: Any) -> None:
    scale = torch.tensor([2.0])
    run = Run(core, lambda: (torch.ones(3).requires_grad_() * 1 + scale).exp())
    scale.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run.restored({}, pytest.fail)


def test_recompute_pass_waits_for_its_collective(core: Any, group: Any) -> None:
    weight, x = torch.ones(4, requires_grad=True), torch.randn(4)
    collectives = torch.ops._c10d_functional

    def call() -> torch.Tensor:
        return weight * collectives.wait_tensor(collectives.all_reduce(x, "sum", group.group_name))

    run = Run(core, call)
    with Ran() as ran:
        restored = run.restored({}, pytest.fail)
    assert ran.names == ["all_reduce", "wait_tensor"]
    assert [torch.equal(ours, x) for ours in restored.values()] == [True]


REDUCTIONS = {"sum": dist.ReduceOp.SUM, "maximum": dist.ReduceOp.MAX}


@pytest.mark.parametrize(("first", "second"), [("sum", "sum"), ("sum", "maximum")])
def test_collective_follows_the_template_only_with_the_same_reduction(
    core: Any, group: Any, first: str, second: str
) -> None:
    def call(reduction: str) -> torch.Tensor:
        y = torch.ones(4)
        dist.all_reduce(y, REDUCTIONS[reduction], group)
        dist.reduce_scatter_tensor(torch.empty(4), y, REDUCTIONS[reduction], group)
        return y

    tape = Run(core, lambda: call(first)).tape
    assert not tape.opaque and [r.form.value for r in records_of(tape)].count("exchange") == 2
    assert len(records_of(tape)) == 4, "the back end's own work to return a result is not an operator"
    assert Run(core, lambda: call(second), (tape,)).follows == (first == second)
