"""Ranks with the same problem solve it once, and no rank depends on another."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest

from memplug.arena import shared
from memplug.arena.judge import judge
from memplug.arena.plan import auto
from memplug.arena.plan.from_trace import last_step, problem_of
from memplug.arena.plan.part import AddressPlan
from memplug.arena.plan.problem import Problem, Solution
from memplug.plans import plan_file
from memplug.profile import trace_file
from tests.support.folders import DATA


@pytest.fixture(scope="module")
def problem() -> Problem:
    return problem_of(last_step(trace_file.load(DATA / "mixtral_ckpt.npz")))


@pytest.fixture
def solves(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which each solve adds its planner."""
    calls: list[str] = []
    plan = auto.plan

    def counted(problem: Problem, planner: str, **limits: float) -> Solution:
        calls.append(planner)
        return plan(problem, planner, **limits)

    monkeypatch.setattr(auto, "plan", counted)
    return calls


def rank(problem: Problem, folder: Path, start: float, answers: multiprocessing.Queue) -> None:
    calls = []
    plan = auto.plan
    auto.plan = lambda *arguments, **limits: calls.append(1) or plan(*arguments, **limits)
    time.sleep(max(0.0, start - time.time()))
    answers.put((shared.solve_once(problem, "auto", 10.0, folder).offsets.tolist(), len(calls)))


def test_one_of_several_simultaneous_ranks_solves_for_all(problem: Problem, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answers, start = context.Queue(), time.time() + 5.0
    ranks = [context.Process(target=rank, args=(problem, tmp_path, start, answers)) for _ in range(3)]
    for each in ranks:
        each.start()
    found = [answers.get(timeout=60) for _ in ranks]
    for each in ranks:
        each.join()
    assert sum(solved for _, solved in found) == 1
    assert len({tuple(offsets) for offsets, _ in found}) == 1


def test_each_problem_is_solved_separately_by_each_planner(problem: Problem, tmp_path: Path, solves: list[str]) -> None:
    for each in (problem, problem.part(np.arange(len(problem) - 1))):
        for planner in ("auto", "spatiotemporal"):
            assert not judge(each, shared.solve_once(each, planner, 10.0, tmp_path))
    assert sorted(solves) == ["auto", "auto", "spatiotemporal", "spatiotemporal"]


def test_rank_solves_by_itself_if_the_first_solver_died(
    problem: Problem, tmp_path: Path, solves: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared.solve_once(problem, "auto", 10.0, tmp_path)
    (file,) = (tmp_path / shared.FOLDER).glob("*.addresses")
    file.unlink()  # the file that marks the start of the solve remains
    monkeypatch.setattr(shared, "GRACE_S", 0.1)
    assert not judge(problem, shared.solve_once(problem, "auto", 0.1, tmp_path))
    assert len(solves) == 2 and file.exists()


@pytest.mark.parametrize("damage", ["cut", "unsound"])
def test_rank_solves_again_if_the_solution_file_is_damaged(
    problem: Problem, tmp_path: Path, solves: list[str], damage: str
) -> None:
    first = shared.solve_once(problem, "auto", 10.0, tmp_path)
    (file,) = (tmp_path / shared.FOLDER).glob("*.addresses")
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        part = AddressPlan.of(plan_file.load(file))
        part.solution.offsets[:] = 0
        plan_file.save(part.alone(), file)
    again = shared.solve_once(problem, "auto", 10.0, tmp_path)
    assert len(solves) == 2 and np.array_equal(again.offsets, first.offsets)


def test_rank_solves_by_itself_if_the_plan_folder_is_a_file(
    problem: Problem, tmp_path: Path, solves: list[str]
) -> None:
    (tmp_path / "plans").write_text("a file")
    assert not judge(problem, shared.solve_once(problem, "auto", 10.0, tmp_path / "plans"))
    assert solves == ["auto"]


def test_old_solution_files_are_removed(problem: Problem, tmp_path: Path) -> None:
    shared.solve_once(problem, "auto", 10.0, tmp_path)
    before = list((tmp_path / shared.FOLDER).iterdir())
    for file in before:
        os.utime(file, (0, 0))
    shared.solve_once(problem, "spatiotemporal", 10.0, tmp_path)
    assert len(before) == 2 and not any(file.exists() for file in before)
