"""The native core finds the same unfilled elements of memory as a reference that keeps a flag for each byte."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from memplug.tokenwise.engine import core as native
from tests.support.compared_tapes import UNFILLED, both, compare
from tests.support.native_forward import Keeps, Run


@pytest.fixture(scope="module")
def core() -> Any:
    return native.core()


def some(y: torch.Tensor, chance: random.Random) -> torch.Tensor:
    """Return a random view of a tensor."""
    for _ in range(chance.randrange(4)):
        dim = chance.randrange(y.dim())
        size = y.shape[dim]
        kind = chance.randrange(5)
        if kind == 0:
            y = y.transpose(dim, chance.randrange(y.dim()))
        elif kind == 1 and y.is_contiguous():
            y = y.view(-1, 4) if y.numel() % 4 == 0 else y.view(-1)
        elif kind == 2 and y.dim() > 1 and size:
            y = y.select(dim, chance.randrange(size))
        elif kind == 3:
            halves = y.tensor_split(2, dim)
            y = halves[chance.randrange(2)]
        else:
            begin = chance.randrange(size + 1)
            y = y.transpose(0, dim)[begin :: chance.randint(1, 2)].transpose(0, dim)
    return y


def use(seed: int) -> torch.Tensor:
    """Fill and read parts of some memory, chosen by the seed, and save some of it."""
    chance = random.Random(seed)
    y = torch.empty(
        chance.choice([(4, 2, 6), (8, 4), (24,), (2, 3, 2, 4)]), dtype=chance.choice([torch.half, torch.int])
    )
    for _ in range(chance.randint(1, 7)):
        part = some(y, chance)
        kind = chance.randrange(8)
        if kind < 4:
            part.fill_(1)
        elif kind < 6:
            part.copy_(torch.ones(part.shape, dtype=y.dtype))
        elif kind == 6 and chance.random() < 0.5:
            part.neg_()
        elif kind == 7 and chance.random() < 0.5:
            part.clone()
    return Keeps.apply(torch.ones(1, requires_grad=True), some(y, chance))


def test_core_finds_exactly_the_unfilled_elements_of_random_views(core: Any) -> None:
    found = []
    for seed in range(600):
        run, reference = both(core, lambda seed=seed: use(seed))
        compare(run.tape, reference)
        found.append(reference.has_unfilled())
    assert 100 < sum(found) < 550


def in_halves(rows: int, but: int) -> torch.Tensor:
    """Return a sum that reads `rows` rows, filled in two halves; the last `but` rows lack the second half."""
    y = torch.empty(rows, 2, 4, dtype=torch.uint8)
    y[..., :2].fill_(1)
    y[: rows - but, :, 2:].fill_(2)
    return y + y[5]


@pytest.mark.parametrize(("rows", "but"), [(1 << 20, 0), (100, 0), (1 << 20, 1), (100, 1)])
def test_column_wise_fills_are_tracked_at_any_size(core: Any, rows: int, but: int) -> None:
    run = Run(core, lambda: in_halves(rows, but))
    assert bool(run.tape.opaque & UNFILLED) == (but > 0)


ROWS = torch.arange(2)


def written_and_read(read: Callable[[torch.Tensor], Any]) -> Callable[[], Any]:
    """Return a function that fills half of some memory, and reads from it."""

    def call() -> None:
        y = torch.empty(4, 6)
        y[:2].fill_(1.0)
        read(y)

    return call


@pytest.mark.parametrize(
    ("read", "unfilled"),
    [
        (lambda y: y[:2] + 1, False),
        (lambda y: y[1:3] + 1, True),
        (lambda y: y.zero_().neg_(), False),
        (lambda y: torch.empty_like(y).zero_(), False),
        (lambda y: torch.zeros_like(y), False),
        (lambda y: y[2:].index_put_((ROWS,), torch.ones(2, 6)) + 1, False),
        (lambda y: y[2:].index_put_((ROWS,), torch.ones(2, 6), accumulate=True), True),
        (lambda y: Keeps.apply(torch.ones(1, requires_grad=True), y[:2]), False),
        (lambda y: Keeps.apply(torch.ones(1, requires_grad=True), y), True),
    ],
)
def test_reads_are_flagged_only_if_they_include_unfilled_elements(
    core: Any, read: Callable[..., Any], unfilled: bool
) -> None:
    run, reference = both(core, written_and_read(read))
    assert reference.has_unfilled() == unfilled
    compare(run.tape, reference)
