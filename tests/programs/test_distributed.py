"""Two real processes: the recipe's losses with and without memplug, ranks that differ, and a run that is killed.

`python -m tests.bench.convergence` runs all launchers, stages, ways in and alphas over 50 steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.folders import ROOT
from tests.support.forking import launch_forked
from tests.support.hosts import QUICK, block
from tests.support.launching import kill_tree, launch, started, wait_until

pytestmark = pytest.mark.distributed

TRAIN = ROOT / "examples/llama2/train.py"
STEPS = 5
Losses = dict[int, float]


def read_losses(log: Path) -> Losses:
    """Return the loss of each step; a kill may have cut off the last line."""
    text = log.read_text() if log.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return {line["step"]: line["loss"] for line in lines if "step" in line}


def read_report(log: Path) -> dict[str, Any]:
    """Return memplug's part of the recipe's report."""
    return json.loads(log.read_text().splitlines()[-1])["report"]["memplug"]


@pytest.fixture(scope="session")
def plain_losses(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Losses]:
    """Return a function that gives the losses of a ZeRO stage without memplug; each stage runs once."""
    known: dict[int, Losses] = {}

    def get(stage: int) -> Losses:
        if stage not in known:
            log = tmp_path_factory.mktemp("plain") / "log.jsonl"
            launch_forked([*recipe(stage, log), "--memplug", "none"])
            known[stage] = read_losses(log)
        return known[stage]

    return get


def recipe(stage: int, log: Path) -> list[Any]:
    """Return arguments with which the recipe has a plan after two steps."""
    config = json.loads((ROOT / "configs/ds_tiny.json").read_text())
    config["memplug"]["profiler"] = QUICK
    quick = log.with_name("ds_quick.json")
    quick.write_text(json.dumps(config))
    where = ["--deepspeed_config", quick, "--zero-stage", stage, "--loss-log", log]
    return [TRAIN, "--steps", STEPS, "--seq-len", "64", *where]


@pytest.mark.long
@pytest.mark.parametrize("alpha", ["1", "auto"])
@pytest.mark.parametrize("stage", [1, 3])
def test_losses_equal_those_without_memplug(
    stage: int, alpha: str, tmp_path: Path, plain_losses: Callable[[int], Losses]
) -> None:
    # here, ranks are forks; the test that kills and resumes a run covers torchrun
    log = tmp_path / "log.jsonl"
    launch_forked([*recipe(stage, log), "--memplug", "install", "--alpha", alpha])
    losses, expected = read_losses(log), plain_losses(stage)
    assert len(losses) == STEPS
    assert losses == (expected if alpha == "1" else pytest.approx(expected, rel=1e-4))
    report = read_report(log)
    assert report["stage"] == "stable" and report["steps"] == STEPS
    assert report["offloaded_bytes"] > 0 and report["recomputed_in_full"] == 0
    if (stage, alpha) == (1, "auto"):
        assert report["offloaded_step_bytes"] == pytest.approx(report["expected_step_bytes"], rel=0.02)


@pytest.mark.long
def test_unchanged_script_under_deepspeed_launcher_has_the_same_losses(
    tmp_path: Path, plain_losses: Callable[[int], Losses]
) -> None:
    log = tmp_path / "log.jsonl"
    arguments = ["memplug.run", *recipe(1, log), "--memplug", "none", "--alpha", "1"]
    done = launch(arguments, launcher="deepspeed", module=True)
    assert read_losses(log) == plain_losses(1)
    assert done.stdout.count("memplug: stable: 4 regions, alpha 1") == 1, "rank 0 logs once that memplug is active"


@pytest.mark.long
def test_ranks_with_unequal_host_memory_train_without_deadlock(tmp_path: Path) -> None:
    # rank 1 gets no host memory: under ZeRO 3, a rank that skipped a recompute pass would leave the other waiting
    unequal = {"host_budget_gib": [1.0, 1e-6]}
    cases = {
        "plain": {"stage": 3, "memplug": None},
        "0": {"stage": 3, "memplug": block(alpha=0), **unequal},
        "1": {"stage": 3, "memplug": block(alpha=1), **unequal},
        "auto": {"stage": 3, "memplug": block(), **unequal},
    }
    launch_forked(["tests.support.training_worker", tmp_path, json.dumps(cases)], module=True)
    for rank in (0, 1):
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        for name in cases:
            assert results[name]["losses"] == results["plain"]["losses"], name
            assert results[name]["gathered"] == [], name
        refused = [results[name]["report"]["host_refusals"] > 0 for name in ("0", "1")]
        assert refused == [rank == 1] * 2
        reports = [json.loads((tmp_path / f"{each}.json").read_text())["1"]["report"] for each in (0, 1)]
        assert reports[0]["alpha_by_link"] == reports[1]["alpha_by_link"] is not None
        assert reports[0]["alpha_by_host"] == reports[1]["alpha_by_host"] == 0.0
        assert results["auto"]["report"]["stage"] == "stable"
        assert results["auto"]["report"]["predicted_host_bytes"] <= 1e-6 * 2**30, (
            "the smallest budget applies to all ranks"
        )


def test_impossible_device_budget_of_one_rank_raises_on_both_ranks(tmp_path: Path) -> None:
    # under ZeRO 3, a rank that raised alone would leave the other waiting
    cases = {
        "impossible": {
            "stage": 3,
            "memplug": {**block(), "swap": {"enabled": False}},
            "device_budget_gib": ["auto", 1e-6],
        },
        "ample": {"stage": 3, "memplug": block(), "device_budget_gib": [1.0, 1.0]},
    }
    launch_forked(["tests.support.training_worker", tmp_path, json.dumps(cases)], module=True)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert ranks[0]["impossible"] == ranks[1]["impossible"]
    assert '"device_budget_gib" is 1e-06, and on rank 1 a step takes' in ranks[0]["impossible"]["refused"]
    for results in ranks:
        assert results["ample"]["stages"][-1] == "stable", "the next session plans once the first is detached"


STAGES = pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.long)])
ADAPTING = {**block(), "profiler": {"warmup_steps": 1, "policy_steps": 2}}


def adapt(folder: Path, stage: int, **cases: dict[str, Any]) -> list[dict[str, Any]]:
    """Run cases on two ranks under a stage of ZeRO, with memplug and without, and compare them.

    All losses must agree, and so must the ranks' stages and programs. Return the first rank's results with memplug.
    """
    lengths = {name: json.dumps(case["lengths"]) for name, case in cases.items()}
    # without memplug, only the lengths of a case matter
    every = {off: {"stage": stage, "memplug": None, "lengths": json.loads(off)} for off in lengths.values()}
    every |= {name: {"stage": stage, "memplug": ADAPTING, **case} for name, case in cases.items()}
    launch_forked(["tests.support.training_worker", folder, json.dumps(every)], module=True)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    for name, case in cases.items():
        for results in ranks:
            assert results[name]["losses"] == pytest.approx(results[lengths[name]]["losses"], rel=1e-4), name
        assert ranks[0][name]["stages"] == ranks[1][name]["stages"], name
        assert ranks[0][name]["history"] == ranks[1][name]["history"], name
        tries = 2 if "by alpha" in case.get("ways", []) else 0
        assert ranks[0][name]["stages"][: 3 + tries].count("gen-policy") == 1 + tries, name
    return [ranks[0][name] for name in cases]


@STAGES
def test_program_change_on_one_rank_changes_all_ranks_at_the_same_step(stage: int, tmp_path: Path) -> None:
    # for a while, rank 1 has longer sequences or other operators; rank 0 continues as before
    steady, short, long = [12] * 20, [12] * 8, [20] * 7
    found = adapt(
        tmp_path,
        stage,
        lengths={"lengths": [steady, short + long + [12] * 5], "operators": [[1] * 20] * 2, "ways": ["by alpha"]},
        operators={"lengths": [steady, steady], "operators": [[1] * 20, [1] * 8 + [2] * 7 + [1] * 5]},
    )
    for case, result in enumerate(found):
        changed = [(step, change, program) for step, change, program in result["history"] if step > 8]
        assert changed[:2] == [(10, "warm-up", 1), (10, "gen-policy", 1)], "the votes on step 9 are read with step 10's"
        stays = stage == 3 and case == 0  # where ranks have to run alike, the plan for longer sequences serves all
        assert changed[-1] == ((13, "stable", 1) if stays else (17, "stable", 0)), "step 16 is read a step later"
        assert result["stages"][8] == "stable" and result["stages"][-4:] == ["stable"] * 4
        assert result["report"]["replans"] == 2 and result["report"]["programs"] == 2


@STAGES
def test_ranks_whose_lengths_change_by_themselves_get_plans_that_change_no_bit(stage: int, tmp_path: Path) -> None:
    # 60 steps of 8 to 48 tokens, on each rank in an order of its own
    lengths = [[8 + (start + 29 * step) % 41 for step in range(60)] for start in (0, 17)]
    memplug = {**block(), "profiler": {"warmup_steps": 1, "policy_steps": 0, "wait_for_plans": True}}
    cases = {way: {"stage": stage, "lengths": lengths, "memplug": memplug if way else None} for way in ("on", "")}
    launch_forked(["tests.support.training_worker", tmp_path, json.dumps(cases)], module=True)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for rank in ranks:
        assert rank["on"]["losses"] == rank[""]["losses"] and rank["on"]["digest"] == rank[""]["digest"]
        assert rank["on"]["history"] == ranks[0]["on"]["history"]
        report = rank["on"]["report"]
        assert report["planned_steps"] >= 40 and 1 <= report["replans"] <= 8
        assert report["planning_stopped_because"] is None


@pytest.mark.long
def test_ranks_find_a_single_program_under_zero_1_and_zero_3(tmp_path: Path) -> None:
    # ZeRO 3 learns in its first steps which parameters to fetch, which must not change the program
    profiler = {**block(), "profiler": {"warmup_steps": 1, "policy_steps": 2}}
    cases = {
        f"{stage} {way}": {"stage": stage, "lengths": [[12] * 12] * 2, "memplug": profiler if way == "on" else None}
        for stage in (1, 3)
        for way in ("on", "off")
    }
    launch_forked(["tests.support.training_worker", tmp_path, json.dumps(cases)], module=True)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for stage in (1, 3):
        for results in ranks:
            assert results[f"{stage} on"]["losses"] == results[f"{stage} off"]["losses"]
            assert results[f"{stage} on"]["stages"][-4:] == ["stable"] * 4
        assert ranks[0][f"{stage} on"]["stages"] == ranks[1][f"{stage} on"]["stages"]
    assert ranks[0]["3 on"]["report"]["programs"] == ranks[0]["1 on"]["report"]["programs"] == 1


@pytest.mark.long
@STAGES
def test_single_different_step_of_one_rank_changes_no_plan(stage: int, tmp_path: Path) -> None:
    # as if rank 1 ran a validation
    operators = [1] * 8 + [2] + [1] * 4 + [2] + [1] * 4
    case = {"lengths": [[12] * 18] * 2, "operators": [[1] * 18, operators]}
    for result in adapt(tmp_path, stage, default=case, own={**case, "ways": ["by alpha"]}):
        assert set(result["stages"][8:]) == {"stable"}
        assert result["report"]["replans"] == 1 and result["report"]["program"] == 0


@pytest.mark.long
def test_killed_run_with_memplug_resumes_with_the_same_losses(tmp_path: Path) -> None:
    # the killed run is the reference: it trains past its checkpoint, and dies in the middle of a step
    killed_log, resumed_log = tmp_path / "killed.jsonl", tmp_path / "resumed.jsonl"
    common = [TRAIN, "--memplug", "install", "--alpha", "1", "--seq-len", "64"]
    common += ["--save-dir", tmp_path / "saves", "--save-every", "6"]
    with started([*common, "--steps", "1000", "--loss-log", killed_log]) as (process, read_output):
        assert wait_until(lambda: max(read_losses(killed_log), default=0) >= 8, process), read_output()
        kill_tree(process)
    expected = read_losses(killed_log)
    assert [path.name for path in (tmp_path / "saves").glob("step-*")] == ["step-00000006"]

    launch_forked([*common, "--steps", "8", "--loss-log", resumed_log, "--resume"])
    assert read_losses(resumed_log) == {step: expected[step] for step in (7, 8)}
    assert read_report(resumed_log)["offloaded_bytes"] > 0
