"""Which file of a plan each rank has, and when ranks go on from theirs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memplug.beside import Beside
from memplug.plans import plan_file
from memplug.plans.schema import MemoryPlan, TrainingPart
from memplug.profile.records import Fingerprint
from memplug.session.plan_store import PlanStore
from memplug.session.techniques import JUDGES
from memplug.swap.plan.part import SwapPart
from tests.support.memory_plans import decided_plan, decisions, small_plan, target

WORLD_SIZE = 3


class OtherRanks:
    """Of this rank: the others answer a `gather` as they were told to."""

    def __init__(self, are_made_up: bool = False, answers: list[Any] | None = None):
        self.are_made_up = are_made_up
        self._answers = answers or []

    def gather(self, value: Any, patient: bool) -> list[Any]:
        return [value, *self._answers]


def store(folder: Path, rank: int, ranks: OtherRanks) -> PlanStore:
    return PlanStore(folder, Fingerprint(model="Llama", rank=rank, world_size=WORLD_SIZE), ranks, JUDGES)


def plan(run: str, rank: int = 0) -> MemoryPlan:
    job = Fingerprint(model="Llama", rank=rank, world_size=WORLD_SIZE)
    return MemoryPlan(fingerprint=job, training=TrainingPart(run=run, index=0, program=None, gradients_stay=False))


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


def otherwise_solved(**fields: Any) -> MemoryPlan:
    return decided_plan().with_part(replace(decisions(), solution=replace(decisions().solution, **fields)))


SWAPPED = SwapPart(names=("aten::mm",), program=(0,) * 9, targets=(target("aten::mm", 1),))
SAME = {
    "all": (decided_plan(), decided_plan(), True),
    "but for measured times": (decided_plan(), otherwise_solved(step_s=9.0), True),
    "but for decisions": (decided_plan(), decided_plan().with_part(replace(decisions(), settings={})), False),
    "but for addresses": (decided_plan(), decided_plan().with_part(replace(small_plan(), dynamic=())), False),
    "with a list": (decided_plan().with_part(SWAPPED), decided_plan().with_part(SWAPPED), True),
    "but for predictions of the list": (
        decided_plan().with_part(SWAPPED),
        decided_plan().with_part(replace(SWAPPED, predicted_stall_s=1.0)),
        True,
    ),
    "but for the list": (decided_plan().with_part(SWAPPED), decided_plan().with_part(SwapPart()), False),
    "but for a list": (decided_plan(), decided_plan().with_part(SWAPPED), False),
    "but for an unknown part": (
        replace(decided_plan(), parts={"later": {"a": 1}}),
        replace(decided_plan(), parts={"later": {"a": 2}}),
        False,
    ),
}


@pytest.mark.parametrize("what", SAME)
def test_a_rank_shares_the_file_of_a_lower_one_that_does_the_same(what: str, tmp_path: Path) -> None:
    lower, own, shares = SAME[what]
    keep(store(tmp_path, 0, OtherRanks()), lower)
    keep(store(tmp_path, 1, OtherRanks()), own)
    assert [file.is_symlink() for file in sorted(tmp_path.glob("*.json"))] == [False, shares]
