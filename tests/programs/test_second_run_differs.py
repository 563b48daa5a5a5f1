"""The behaviour of a run whose kept plan is damaged, forged, or made for another job or other inputs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from memplug.arena.plan.part import AddressPlan
from memplug.plans import plan_file
from memplug.session.table import Stage
from memplug.tokenwise.plan.decisions import Decisions
from tests.support.second_runs import SMALL, STEPS, Run, folder, kept, only_plan, train

__all__ = ["folder", "kept"]


def wider() -> nn.Module:
    """Return another model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes))


def change(file: Path, **fields: Any) -> None:
    """Make the plan in this job's own file look like that of another job."""
    plan = plan_file.load(file)
    plan_file.save(replace(plan, fingerprint=replace(plan.fingerprint, **fields)), file)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def overlap(file: Path) -> None:
    plan = plan_file.load(file)
    part = AddressPlan.of(plan)
    offsets, kept = part.solution.offsets.copy(), part.problem.buffers["outlives"]
    offsets[~kept] = offsets[~kept].min()
    plan_file.save(plan.with_part(replace(part, solution=replace(part.solution, offsets=offsets))), file)


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def with_more_host_memory(file: Path) -> None:
    plan = plan_file.load(file)
    decisions = Decisions.of(plan)
    larger = replace(decisions, solution=replace(decisions.solution, host_bytes=2**60))
    plan_file.save(plan.with_part(larger), file)


def lose(file: Path, what: str) -> None:
    plan = plan_file.load(file)
    parts = {name: part for name, part in plan.parts.items() if name != what}
    training = replace(plan.training, program=None) if what == "program" else plan.training
    plan_file.save(replace(plan, parts=parts, training=training), file)


def with_foreign_part(file: Path) -> None:
    plan = plan_file.load(file)
    plan_file.save(replace(plan, parts={**plan.parts, "swap": {"tensors": 3}}), file)


SPOILT: dict[str, tuple[Callable[[Path], None], str]] = {
    "world size": (lambda file: change(file, world_size=8), "world size 8, now 1"),
    "versions": (lambda file: change(file, versions=(("torch", "2.0.0"),)), "versions torch 2.0.0, now "),
    "layout": (lambda file: change(file, layout=(("zero_stage", 3),)), "layout zero_stage 3, now none"),
    "device": (lambda file: change(file, device="NVIDIA H200"), "device NVIDIA H200, now cpu"),
    "flipped bit": (flip, "not what was saved"),
    "truncated": (cut_short, "not what was saved"),
    "addresses": (overlap, "the judge refuses it"),
    "host memory": (with_more_host_memory, "and the host budget is"),
    "no decisions": (lambda file: lose(file, "tokenwise"), "a program without decisions"),
    "no program": (lambda file: lose(file, "program"), "decisions without a program"),
    "foreign part": (with_foreign_part, "in its part swap"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_invalid_plan_is_refused_with_the_reason(
    what: str, kept: tuple[Path, Run], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoil, reason = SPOILT[what]
    spoil(only_plan(folder))
    spoilt = only_plan(folder).read_bytes()
    with caplog.at_level(logging.INFO, "memplug"):
        run = train(folder)
    assert run.is_first() and run.losses == kept[1].losses
    assert reason in run.report["not_resumed_because"] and run.report["resumed_from"] is None
    assert f"no kept plan is used: {run.report['not_resumed_because']}" in caplog.text
    assert only_plan(folder).read_bytes() != spoilt and plan_file.load(only_plan(folder))


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"model": wider}, "parameters 2"),
        ({"block": {"arena": {"planner": "search"}}}, 'another "memplug" block'),
        ({"block": {"profiler": {"warmup_steps": 1, "policy_steps": 0, "length_tolerance": 0.1}}}, '"memplug" block'),
    ],
)
def test_run_of_another_job_plans_anew_and_logs_how_the_job_differs(
    other: dict[str, Any], reason: str, folder: Path
) -> None:
    run = train(folder, **other)
    assert run.is_first() and reason in run.report["not_resumed_because"]
    assert len(list(folder.glob("*.json"))) == 2, "each has its own plan"


def test_inputs_unlike_the_plans_are_detected_in_the_first_step(folder: Path, tmp_path: Path) -> None:
    run, first = train(folder, micro_batches=2), train(tmp_path / "new", micro_batches=2)
    assert run.losses == first.losses and run.stages == first.stages
    assert run.report["replans"] == run.report["arena_plans"] == 1
    assert run.report["resumed_from"] is None and "another program" in run.report["not_resumed_because"]
    assert len(list(folder.glob("*.json"))) == 2
    assert train(folder, micro_batches=2).is_second(), "its own plan is the latest"


@pytest.mark.parametrize("other", [{"batch": 4}, {"length": lambda step: 24}])
def test_larger_inputs_than_the_plans_are_planned_for_without_a_warm_up(
    other: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    run, first = train(folder, **other), train(tmp_path / "new", **other)
    assert run.losses == first.losses
    assert Stage.WARM_UP not in run.stages and run.stages.count(Stage.GEN_POLICY) == 1
    assert run.report["replans"] == run.report["arena_plans"] == 1
    assert run.report["resumed_from"] is None and "another program" in run.report["not_resumed_because"]
    assert len(list(folder.glob("*.json"))) == 2
    assert train(folder, **other).is_second(), "its own plan is the latest"


@pytest.mark.parametrize("other", [{"batch": 1}, {"length": lambda step: 9}, {"length": lambda step: 15}])
def test_run_with_smaller_inputs_begins_under_the_kept_plan(
    other: dict[str, Any], folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "memplug"):
        run = train(folder, **other, steps=2 * STEPS)
    assert run.losses == train(tmp_path / "new", **other, steps=2 * STEPS).losses
    assert "is not used" not in caplog.text and run.report["resumed_from"]
    assert run.before[0] is run.stages[0] is Stage.STABLE and Stage.WARM_UP not in run.stages
    assert min(run.shares[-4:]) >= 0.99


def test_run_with_slightly_different_inputs_uses_the_kept_plan(
    folder: Path, kept: tuple[Path, Run], caplog: pytest.LogCaptureFixture
) -> None:
    loose = {"profiler": {**SMALL["profiler"], "length_tolerance": 0.5}}
    ours = folder.parent / "loose"
    train(ours, block=loose)
    with caplog.at_level(logging.WARNING, "memplug"):
        run = train(ours, length=lambda step: 17, block=loose)
    assert "is not used" not in caplog.text
    assert set(run.stages) == {Stage.STABLE} and run.report["replans"] == 0 and run.report["resumed_from"]
    assert run.report["swapped_fraction"] == train(ours, block=loose).report["swapped_fraction"]
    assert run.report["offloaded_bytes"] > kept[1].report["offloaded_bytes"] // 2


def test_run_with_an_earlier_batch_size_finds_its_kept_plan(folder: Path) -> None:
    train(folder, batch=4)
    back = train(folder)
    assert back.stages[0] is Stage.STABLE and back.report["replans"] == back.report["arena_plans"] == 0
