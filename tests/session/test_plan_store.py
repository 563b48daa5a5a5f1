"""The plan file that each rank keeps, and when ranks resume from these files."""

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
    """Stand-in for `Ranks`: other ranks answer a `gather` with `answers`, or do not exist (`are_made_up`)."""

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
def test_estimate_keeps_plans_for_all_ranks_and_a_run_only_for_its_rank(are_made_up: bool, tmp_path: Path) -> None:
    keep(store(tmp_path, 0, OtherRanks(are_made_up)), plan("run"))
    files = sorted(tmp_path.glob("*.json"))
    assert len(files) == (WORLD_SIZE if are_made_up else 1)
    assert [file.is_symlink() for file in files] == [False, True, True][: len(files)]
    assert all(file.samefile(files[0]) for file in files)


def test_rank_that_replaces_an_estimated_plan_leaves_other_ranks_plans(tmp_path: Path) -> None:
    keep(store(tmp_path, 0, OtherRanks(are_made_up=True)), plan("estimate"))
    keep(store(tmp_path, 1, OtherRanks()), plan("run", rank=1))
    files = sorted(tmp_path.glob("*.json"))
    assert [plan_file.load(file).training.run for file in files] == ["estimate", "run", "estimate"]
    assert [file.is_symlink() for file in files] == [False, False, True]


@pytest.mark.parametrize(
    ("keys", "why", "refused"),
    [
        ([("estimate", 0, 0)], "", ""),
        ([], "it swaps too much", "it swaps too much"),
        ([("run", 0, 0)], "", "no earlier run has kept a plan for every rank"),
    ],
)
def test_ranks_resume_from_an_estimated_plan_only_if_all_can(
    keys: list[tuple[str, int, int]], why: str, refused: str, tmp_path: Path
) -> None:
    keep(store(tmp_path, 0, OtherRanks(are_made_up=True)), plan("estimate"))
    of_rank_1 = store(tmp_path, 1, OtherRanks(answers=[("a run", keys, why)]))
    found = of_rank_1.load(lambda plan: "")
    assert of_rank_1.refused == refused and len(found) == (not refused)


def with_solution(**fields: Any) -> MemoryPlan:
    return decided_plan().with_part(replace(decisions(), solution=replace(decisions().solution, **fields)))


SWAPPED = SwapPart(names=("aten::mm",), program=(0,) * 9, targets=(target("aten::mm", 1),))
SAME = {
    "equal plans": (decided_plan(), decided_plan(), True),
    "other measured times": (decided_plan(), with_solution(step_s=9.0), True),
    "other decisions": (decided_plan(), decided_plan().with_part(replace(decisions(), settings={})), False),
    "other addresses": (decided_plan(), decided_plan().with_part(replace(small_plan(), dynamic=())), False),
    "equal swap lists": (decided_plan().with_part(SWAPPED), decided_plan().with_part(SWAPPED), True),
    "other predictions of the swap list": (
        decided_plan().with_part(SWAPPED),
        decided_plan().with_part(replace(SWAPPED, predicted_stall_s=1.0)),
        True,
    ),
    "another swap list": (decided_plan().with_part(SWAPPED), decided_plan().with_part(SwapPart()), False),
    "an added swap list": (decided_plan(), decided_plan().with_part(SWAPPED), False),
    "other contents of an unknown part": (
        replace(decided_plan(), parts={"later": {"a": 1}}),
        replace(decided_plan(), parts={"later": {"a": 2}}),
        False,
    ),
}


@pytest.mark.parametrize("case", SAME)
def test_rank_shares_the_file_of_a_lower_rank_with_the_same_plan(case: str, tmp_path: Path) -> None:
    lower, own, shares = SAME[case]
    keep(store(tmp_path, 0, OtherRanks()), lower)
    keep(store(tmp_path, 1, OtherRanks()), own)
    assert [file.is_symlink() for file in sorted(tmp_path.glob("*.json"))] == [False, shares]
