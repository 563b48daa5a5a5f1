"""NCCL's stand-in on two real processes: gloo's numbers, and a race if a result is read without waiting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import launch

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return each rank's results of every collective; all of them run in one launch."""
    folder: Path = tmp_path_factory.mktemp("collectives")
    launch(["tests.cudasim.collectives_worker", folder], module=True, env={"CUDASIM_RACES": "count"})
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_every_collective_equals_gloo_under_every_schedule(ranks: list[dict[str, Any]]) -> None:
    assert [rank["differ"] for rank in ranks] == [[], []]


def test_collectives_followed_by_a_wait_are_ordered(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert len(rank["violations"]) == 5 and set(rank["violations"].values()) == {0}


def test_result_read_without_wait_is_a_race(ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks):
        none = [name for name, races in rank["not waited"].items() if races == 0]
        assert none == [name for name in rank["not waited"] if "broadcast" in name and number == 1], (
            "the sender already has the result"
        )
    unchecked = [name for name in ranks[0]["not waited"] if all(rank["not waited"][name] is None for rank in ranks)]
    assert unchecked == [], "some rank gets a result of every collective"


def test_tensors_of_a_dropped_collective_keep_memory_until_it_is_done(ranks: list[dict[str, Any]]) -> None:
    assert [name for rank in ranks for name, races in rank["dropped"].items() if races] == []


def test_barrier_returns_when_the_device_is_done(ranks: list[dict[str, Any]]) -> None:
    assert [rank["pending after a barrier"] for rank in ranks] == [0, 0]
