"""Which file of a plan each rank has, and when ranks go on from theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memplug.beside import Beside
from memplug.plans import plan_file
from memplug.plans.schema import MemoryPlan, Training
from memplug.profile.records import Fingerprint
from memplug.session.plan_store import PlanStore
from memplug.session.techniques import PART_TYPES

WORLD_SIZE = 3


class OtherRanks:
    """Of this rank: the others answer a `gather` as they were told to."""

    def __init__(self, are_made_up: bool = False, answers: list[Any] | None = None):
        self.are_made_up = are_made_up
        self._answers = answers or []

    def gather(self, value: Any, patient: bool) -> list[Any]:
        return [value, *self._answers]


def store(folder: Path, rank: int, ranks: OtherRanks) -> PlanStore:
    return PlanStore(folder, Fingerprint(model="Llama", rank=rank, world_size=WORLD_SIZE), ranks, PART_TYPES)


def plan(run: str, rank: int = 0) -> MemoryPlan:
    job = Fingerprint(model="Llama", rank=rank, world_size=WORLD_SIZE)
    return MemoryPlan(fingerprint=job, training=Training(run=run, index=0, program=None, gradients_stay=False))


def keep(store: PlanStore, plan: MemoryPlan) -> None:
    beside = Beside(waits=True)
    store.keep(plan, beside)
    beside.take()


@pytest.mark.parametrize("are_made_up", [True, False])
def test_a_plan_of_an_estimate_is_that_of_all_ranks_and_one_of_a_run_is_of_its_own_rank(
    are_made_up: bool, tmp_path: Path
) -> None:
    keep(store(tmp_path, 0, OtherRanks(are_made_up)), plan("run"))
    files = sorted(tmp_path.glob("*.json"))
    assert len(files) == (WORLD_SIZE if are_made_up else 1)
    assert [file.is_symlink() for file in files] == [False, True, True][: len(files)]
    assert all(file.samefile(files[0]) for file in files)


def test_a_rank_that_keeps_another_plan_than_the_estimated_one_leaves_that_to_the_others(tmp_path: Path) -> None:
    keep(store(tmp_path, 0, OtherRanks(are_made_up=True)), plan("estimate"))
    keep(store(tmp_path, 1, OtherRanks()), plan("run", rank=1))
    files = sorted(tmp_path.glob("*.json"))
    assert [plan_file.load(file).training.run for file in files] == ["estimate", "run", "estimate"]
    assert [file.is_symlink() for file in files] == [False, False, True]


@pytest.mark.parametrize(
    ("keys", "why", "refused"),
    [
        ([("estimate", 0)], "", ""),
        ([], "it swaps too much", "it swaps too much"),
        ([("run", 0)], "", "the ranks have no plans of one run"),
    ],
)
def test_ranks_go_on_from_an_estimated_plan_only_if_all_can(
    keys: list[tuple[str, int]], why: str, refused: str, tmp_path: Path
) -> None:
    keep(store(tmp_path, 0, OtherRanks(are_made_up=True)), plan("estimate"))
    of_rank_1 = store(tmp_path, 1, OtherRanks(answers=[("a run", keys, why)]))
    found = of_rank_1.load(lambda plan: "")
    assert of_rank_1.refused == refused and len(found) == (not refused)
