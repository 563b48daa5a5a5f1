"""A plan lets a unit that communicates run again only if all ranks of its group have the same plan."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from memplug.tokenwise.agreement import is_agreed


def region(name: str, key: str, partners: set[int] | None) -> Any:
    shares = partners is None or bool(partners)
    return SimpleNamespace(
        name=name,
        key=key,
        partners=None if partners is None else frozenset(partners),
        native=SimpleNamespace(shares=shares),
    )


def answers(ranks: Sequence[Sequence[Any]]) -> list[bool]:
    """Return the answers of all ranks, each on a thread of its own."""
    given: list[Any] = [None] * len(ranks)
    found: list[bool] = [False] * len(ranks)
    barrier = threading.Barrier(len(ranks))

    def ask(rank: int) -> None:
        def gather(own: Any) -> list[Any]:
            barrier.wait()
            given[rank] = own
            barrier.wait()
            return list(given)

        found[rank] = is_agreed(ranks[rank], gather, range(len(ranks)))

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize(
    ("ranks", "agreed"),
    [
        pytest.param([[("0", "a", {0, 1})], [("0", "a", {0, 1})]], True, id="the same operators"),
        pytest.param([[("0", "a", {0, 1})], [("0", "b", {0, 1})]], False, id="other operators"),
        pytest.param([[("0", "a", {0, 1})], []], False, id="one rank lacks the region"),
        pytest.param([[("0", "a", set())], [("0", "b", set())]], True, id="no rank communicates"),
        pytest.param([[("0", "a", {0})], [("0", "b", {1})]], True, id="ranks do not communicate with each other"),
        pytest.param([[("0", "a", None)], [("0", "a", None)]], False, id="partners unknown"),
        pytest.param(
            [[("0", "a", {0, 1})], [("0", "a", {0, 1})], [("0", "a", {2, 3})], [("0", "b", {2, 3})]],
            False,
            id="two of four disagree",
        ),
    ],
)
def test_all_ranks_agree_whether_units_may_run_again(
    ranks: list[list[tuple[str, str, set[int] | None]]], agreed: bool
) -> None:
    assert answers([[region(*each) for each in rank] for rank in ranks]) == [agreed] * len(ranks)
