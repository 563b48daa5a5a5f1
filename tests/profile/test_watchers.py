"""The bus calls each watcher of operators for its own needs alone (memplug/profile/native/bus.h)."""

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
    """Yield the extension, which has a bus of its own, without watchers before and after a test."""
    loaded = extension.load()
    loaded.take_heard()
    before = callbacks()
    yield loaded
    for order in (FIRST, SECOND, THIRD):
        loaded.unwatch(order)
    assert callbacks() == before, "a torch callback is left"


def heard(bus: Any, call: Callable[[], object]) -> list[tuple[int, str, bool]]:
    """Return the watchers' calls during `call`: each watcher's order, the operator, and whether the operator ended."""
    bus.take_heard()
    call()
    return bus.take_heard()


def cosine(*told: tuple[int, bool]) -> list[tuple[int, str, bool]]:
    return [(order, "aten::cos", ended) for order, ended in told]


@pytest.fixture
def x() -> torch.Tensor:
    return torch.ones(2)


@pytest.mark.parametrize("need", [ENDS, TENSORS])
def test_watchers_with_equal_needs_are_called_in_their_order(bus: Any, x: torch.Tensor, need: int) -> None:
    for order in (THIRD, FIRST, SECOND):
        bus.watch(order, need)
    all_of = (FIRST, SECOND, THIRD)
    assert heard(bus, x.cos) == cosine(*((each, False) for each in all_of), *((each, True) for each in all_of))


def test_each_watcher_is_called_only_for_its_needs(bus: Any, x: torch.Tensor) -> None:
    bus.watch(FIRST, BEGINNINGS)
    bus.watch(SECOND, ENDS)
    told = heard(bus, x.cos)
    assert sorted(told) == cosine((FIRST, False), (SECOND, False), (SECOND, True))


def test_watcher_that_declines_an_operators_end_is_not_called_for_it(bus: Any, x: torch.Tensor) -> None:
    bus.watch(FIRST, TENSORS, declines=True)
    bus.watch(SECOND, TENSORS)
    assert heard(bus, x.cos) == cosine((FIRST, False), (SECOND, False), (SECOND, True))


def test_failing_watcher_stops_no_other_and_still_sees_the_operators_end(bus: Any, x: torch.Tensor) -> None:
    bus.watch(FIRST, TENSORS, throws=True)
    bus.watch(SECOND, TENSORS)
    told = [*cosine((FIRST, False), (SECOND, False)), *cosine((FIRST, True), (SECOND, True))]
    assert heard(bus, x.cos) == told
    assert torch.equal(x.cos(), torch.cos(x)), "the operator runs"


def test_removed_watcher_is_not_called(bus: Any, x: torch.Tensor) -> None:
    before = callbacks()
    bus.watch(FIRST, TENSORS)
    assert callbacks()
    bus.watch(SECOND, TENSORS)
    bus.unwatch(FIRST)
    assert heard(bus, x.cos) == cosine((SECOND, False), (SECOND, True))
    bus.unwatch(SECOND)
    assert heard(bus, x.cos) == [] and callbacks() == before


def test_bus_calls_a_watcher_until_its_last_watching_object_is_deleted(bus: Any, x: torch.Tensor) -> None:
    one, other = (bus.Watching(THIRD, ENDS) for _ in range(2))
    assert heard(bus, x.cos) == cosine((THIRD, False), (THIRD, True)), "once, not twice"
    del one
    assert heard(bus, x.cos) == cosine((THIRD, False), (THIRD, True))
    del other
    assert heard(bus, x.cos) == []


def test_ending_a_silenced_watcher_does_not_end_its_successor(bus: Any, x: torch.Tensor) -> None:
    # the child of a fork silences watchers
    former = bus.Watching(THIRD, ENDS)
    bus.silence(THIRD)
    assert heard(bus, x.cos) == []
    next_one = bus.Watching(THIRD, ENDS)
    del former
    assert heard(bus, x.cos) == cosine((THIRD, False), (THIRD, True))
    del next_one
    assert heard(bus, x.cos) == []
