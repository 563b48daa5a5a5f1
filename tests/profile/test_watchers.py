"""The bus tells each watcher of operators what it asked for, whatever the others do (memplug/profile/native/bus.h)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support import extension
from tests.support.recording import callbacks

BEGINNINGS, ENDS, TENSORS = range(3)  # in the order of `Need`
FIRST, SECOND, THIRD = range(3)  # in the order of `Order`


@pytest.fixture
def bus() -> Iterator[Any]:
    """Yield the extension, which has a bus of its own; nobody watches before and after a test."""
    loaded = extension.load()
    loaded.take_heard()
    before = callbacks()
    yield loaded
    for order in (FIRST, SECOND, THIRD):
        loaded.unwatch(order)
    assert callbacks() == before, "a callback of torch's is left"


def heard(bus: Any, call: Callable[[], object]) -> list[tuple[int, str, bool]]:
    """Return what watchers were told: their order, the operator, and whether it ended."""
    bus.take_heard()
    call()
    return bus.take_heard()


def cosine(*told: tuple[int, bool]) -> list[tuple[int, str, bool]]:
    return [(order, "aten::cos", ended) for order, ended in told]


@pytest.fixture
def x() -> torch.Tensor:
    return torch.ones(2)


@pytest.mark.parametrize("need", [ENDS, TENSORS])
def test_those_who_need_the_same_are_told_in_their_order_of_beginnings_and_ends(
    bus: Any, x: torch.Tensor, need: int
) -> None:
    for order in (THIRD, FIRST, SECOND):
        bus.watch(order, need)
    all_of = (FIRST, SECOND, THIRD)
    assert heard(bus, x.cos) == cosine(*((each, False) for each in all_of), *((each, True) for each in all_of))


def test_each_is_told_what_it_needs_alone(bus: Any, x: torch.Tensor) -> None:
    bus.watch(FIRST, BEGINNINGS)
    bus.watch(SECOND, ENDS)
    told = heard(bus, x.cos)
    assert sorted(told) == cosine((FIRST, False), (SECOND, False), (SECOND, True))


def test_one_that_declines_an_end_is_not_told_of_it_and_others_are(bus: Any, x: torch.Tensor) -> None:
    bus.watch(FIRST, TENSORS, declines=True)
    bus.watch(SECOND, TENSORS)
    assert heard(bus, x.cos) == cosine((FIRST, False), (SECOND, False), (SECOND, True))


def test_one_that_fails_keeps_nothing_from_the_others_and_is_told_of_the_end(bus: Any, x: torch.Tensor) -> None:
    bus.watch(FIRST, TENSORS, throws=True)
    bus.watch(SECOND, TENSORS)
    told = [*cosine((FIRST, False), (SECOND, False)), *cosine((FIRST, True), (SECOND, True))]
    assert heard(bus, x.cos) == told
    assert torch.equal(x.cos(), torch.cos(x)), "the operator runs"


def test_nobody_is_told_once_he_watches_no_more(bus: Any, x: torch.Tensor) -> None:
    before = callbacks()
    bus.watch(FIRST, TENSORS)
    assert callbacks()
    bus.watch(SECOND, TENSORS)
    bus.unwatch(FIRST)
    assert heard(bus, x.cos) == cosine((SECOND, False), (SECOND, True))
    bus.unwatch(SECOND)
    assert heard(bus, x.cos) == [] and callbacks() == before


def test_an_operator_is_watched_for_as_long_as_one_of_several_asks(bus: Any, x: torch.Tensor) -> None:
    one, other = (bus.Watching(THIRD, ENDS) for _ in range(2))
    assert heard(bus, x.cos) == cosine((THIRD, False), (THIRD, True)), "once, not twice"
    del one
    assert heard(bus, x.cos) == cosine((THIRD, False), (THIRD, True))
    del other
    assert heard(bus, x.cos) == []


def test_one_that_was_silenced_is_told_of_nothing_and_its_end_is_not_that_of_the_next(
    bus: Any, x: torch.Tensor
) -> None:
    """A watcher is silenced like this in the child of a fork."""
    former = bus.Watching(THIRD, ENDS)
    bus.silence(THIRD)
    assert heard(bus, x.cos) == []
    next_one = bus.Watching(THIRD, ENDS)
    del former
    assert heard(bus, x.cos) == cosine((THIRD, False), (THIRD, True))
    del next_one
    assert heard(bus, x.cos) == []
