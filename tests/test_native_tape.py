"""The native tape is the one that a Python dispatch mode notes of the same forward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from memplug import native
from memplug.execute import operators
from memplug.execute.tape import Form
from tests import forwards
from tests.blocks import Layer
from tests.test_tape import Recording

FORMS = list(Form)
AUTOGRADS_OWN = {"aten::detach", "aten::clone"}
KINDS = [
    kind
    for name, kind in vars(forwards).items()
    if isinstance(kind, type) and issubclass(kind, Layer) and kind is not Layer and name != "Block"
]
# the others: a frame keeps the former values of memory from outside that is written to; an opaque one
REPLAYED = [kind for kind in KINDS if kind.__name__ not in ("WritesInput", "Statistics", "RunsInvisibleKernel")]


@pytest.fixture(scope="module")
def core() -> Any:
    core = native.load()
    core.describe_operators(operators.describe)
    return core


def both(core: Any, call: Callable[[], Any]) -> tuple[Any, Any]:
    """The native tape and the Python one of the same call."""
    tape = core.Tape()
    with Recording() as reference:
        tape.begin()
        try:
            call()
        finally:
            tape.end()
    return tape, reference.tape


def compare(tape: Any, reference: Any) -> None:
    """Operators alike one by one, and their storages up to the numbers. torch's own operators inside of another one are
    left out: a view of a saved tensor, a copy of memory that is about to be overwritten, or of a conjugated view.
    """
    found, at = tape.records(), 0
    called: dict[int, int] = {}
    copied: dict[int, int] = {}  # by torch itself: the storage that a copy stands for
    for record in reference.records:
        overload = record.func._overloadname
        full = record.func._schema.name + ("" if overload in ("", "default") else f".{overload}")
        if full in AUTOGRADS_OWN and (at == len(found) or found[at][0] != full):
            copied.update(dict(zip(record.outputs, record.inputs, strict=False)))
            continue
        assert at < len(found), full
        name, form, root, inputs, made, _ = found[at]
        at += 1
        assert name == full
        assert FORMS[form] is record.form, name
        assert root == record.root, name
        assert len(inputs) == len(record.inputs), name
        read = [copied.get(number, number) for number in record.inputs]
        for ours, theirs in [*zip(inputs, read, strict=True), *zip(made, record.outputs, strict=True)]:
            assert called.setdefault(ours, theirs) == theirs, name
    assert at == len(found)
    assert len(set(called.values())) == len(called)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_tape_of_every_forward_is_that_of_the_dispatch_mode(core: Any, kind: type[Layer]) -> None:
    torch.manual_seed(0)
    layer = kind()
    x = torch.randn(6, 4, 16, requires_grad=True)
    tape, reference = both(core, lambda: layer(x * 1))
    assert reference.records
    compare(tape, reference)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_second_forward_is_verified_against_the_first(core: Any, kind: type[Layer]) -> None:
    torch.manual_seed(0)
    layer = kind()
    x = torch.randn(6, 4, 16)
    tapes = []
    for _ in range(2):
        tape = core.Tape()
        with observed(tape):
            layer(x.requires_grad_() * 1)
        tapes.append(tape)
    first, second = tapes
    verification = core.Verification(first)
    with observed(verification):
        layer(x.requires_grad_() * 1)
    alike = first.records() == second.records()
    assert verification.departed != alike
    assert not alike or verification.verified == len(first.records())


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
def test_a_forward_that_differs_departs_where_it_does(core: Any, change: str) -> None:
    x = torch.randn(4, 4)
    tape = core.Tape()
    with observed(tape):
        CHANGES[change](x.tanh(), 0)
    verification = core.Verification(tape)
    with observed(verification):
        CHANGES[change](x.tanh(), 1)
    assert verification.departed and 1 <= verification.verified < len(tape.records()) + 1


@contextlib.contextmanager
def observed(by: Any) -> Iterator[None]:
    by.begin()
    try:
        yield
    finally:
        by.end()


@pytest.mark.parametrize("kind", REPLAYED, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("captured", ["nothing", "matmuls", "rows"])
def test_a_replay_restores_what_backward_asks_for_to_the_bit(core: Any, kind: type[Layer], captured: str) -> None:
    torch.manual_seed(0)
    layer = kind()
    x = torch.randn(6, 4, 16, requires_grad=True) * 1
    tape, saved = core.Tape(), []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        tape.save(tensor)
        saved.append(tensor)
        return tensor

    outputs = Outputs()
    with outputs, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), observed(tape):
        out = layer(x)
    assert not tape.opaque
    after = torch.get_rng_state()
    copies = outputs.of(tape) if captured != "nothing" else {}
    rows = {index: -1 if captured == "matmuls" else tensor.shape[0] // 2 for index, tensor in copies.items()}

    def substitute(index: int) -> tuple[list[torch.Tensor], int]:
        if rows[index] >= 0:
            copies[index][rows[index] :] = float("nan")
        return [copies[index]], rows[index]

    restored = tape.restored({index: count < 0 for index, count in rows.items()}, substitute)
    assert torch.equal(torch.get_rng_state(), after)
    assert len(restored) == len(saved) > 0
    for ours, theirs in zip(restored, saved, strict=True):
        assert ours.shape == theirs.shape and ours.stride() == theirs.stride() and ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs.detach())
    del out


class Outputs(TorchDispatchMode):
    """A copy of what every matmul of a forward gave, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.matmuls: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name in MATMULS:
            self.matmuls.append(out.clone())
        return out

    def of(self, tape: Any) -> dict[int, torch.Tensor]:
        """By index on the tape."""
        indices = [index for index, record in enumerate(tape.records()) if record[0] in MATMULS]
        return dict(zip(indices, self.matmuls, strict=True))


MATMULS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}


class Drops(nn.Module):
    """Dropout of every kind: an operator that draws, memory that is drawn into, and by a generator of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = torch.Generator().manual_seed(3)
        mask = torch.empty_like(x).bernoulli_(0.5, generator=own)
        y = F.dropout(x.sin(), 0.3) * torch.rand_like(x)
        return (y * mask).exp() * torch.randperm(x.shape[-1])


def test_random_operators_draw_again_what_they_drew(core: Any) -> None:
    tape, saved = core.Tape(), []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        tape.save(tensor)
        saved.append(tensor)
        return tensor

    x = torch.randn(8, 8, requires_grad=True) * 1
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), observed(tape):
        out = Drops()(x)
    torch.rand(7)
    state = torch.get_rng_state()
    for _ in range(2):
        for ours, theirs in zip(tape.restored({}, pytest.fail), saved, strict=True):
            assert torch.equal(ours, theirs.detach())
    assert torch.equal(torch.get_rng_state(), state)
    del out


def test_only_what_is_asked_for_runs(core: Any) -> None:
    tape = core.Tape()
    x = torch.randn(4, 4)
    with observed(tape):
        y = x.sin()
        y.cos()
        z = (y @ y).tanh()
        torch.rand(3)
        tape.save(z)
    run, substitute, skip = range(3)
    assert [name for name, *_ in tape.records()] == ["aten::sin", "aten::cos", "aten::mm", "aten::tanh", "aten::rand"]
    assert tape.actions({}) == [run, skip, run, run, skip]
    assert tape.actions({2: True}) == [skip, skip, substitute, run, skip]
    assert tape.actions({2: False}) == [run, skip, substitute, run, skip]


def test_casts_of_autocast_are_operators_of_their_own(core: Any) -> None:
    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        tape, reference = both(core, lambda: (x @ weight).exp())
    compare(tape, reference)
    assert [record[0] for record in tape.records()].count("aten::_to_copy") == 2
