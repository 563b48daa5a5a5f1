"""A second run of a job is planned for, and served by the arena, at its first step; another begins as a first one."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memplug
from memplug.arena.plan.part import AddressPlan
from memplug.arena.technique import State
from memplug.plans import plan_file
from memplug.session.table import Stage
from memplug.tokenwise.plan.decisions import Decisions
from tests.support.forking import launch_forked
from tests.support.serving import llama, mixtral

STEPS = 14
SMALL = {"tokenwise": {"min_offload_bytes": 1}, "profiler": {"warmup_steps": 1, "policy_steps": 0}}
FIRST = [Stage.WARM_UP, Stage.GEN_POLICY, Stage.STABLE]  # after each of the first steps of a first run


@dataclass
class Run:
    """Of a training: for each step its loss and where it left session and arena, and the report at the end."""

    losses: list[float] = field(default_factory=list)
    before: tuple[Stage, State | None] = (Stage.OFF, None)
    stages: list[Stage] = field(default_factory=list)
    states: list[State | None] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    arena_bytes: int = 0  # of the plan that served last

    def is_first(self) -> bool:
        """Whether it went through all stages, and made plans of its own."""
        return self.stages[: len(FIRST)] == FIRST and self.report["replans"] == self.report["arena_plans"] == 1

    def is_second(self) -> bool:
        """Whether it had both plans from the first step on, and looked for none."""
        report = self.report
        made = report["replans"], report["arena_plans"], report["recorded_steps"]
        return (
            made == (0, 0, 0)
            and report["planned_steps"] == len(self.stages)
            and {self.before[0], *self.stages} == {Stage.STABLE}
            and set(self.states) == {State.SERVING}
        )


def train(
    folder: Path,
    model: Callable[[], nn.Module] = llama,
    *,
    batch: int = 2,
    steps: int = STEPS,
    keeps_gradients: bool = False,
    micro_batches: int = 1,
    length: Callable[[int], int] = lambda step: 16,
    block: dict[str, Any] | None = None,
) -> Run:
    """On tokens that are the same for the same arguments, with AdamW, which makes its state in the first step."""
    torch.manual_seed(0)
    network, run = model(), Run()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    tokens = torch.Generator("cpu").manual_seed(1)
    with memplug.attach(network, {"enabled": True, "plan_dir": str(folder), **SMALL, **(block or {})}) as session:
        run.before = session.stage, None
        for step in range(steps):
            for _ in range(micro_batches):
                ids = torch.randint(0, 64, (batch, length(step)), generator=tokens, device="cpu").to(network.device)
                loss = network(ids, labels=ids).loss
                loss.backward()
                run.losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad(set_to_none=not keeps_gradients)
            session.step()
            run.stages.append(session.stage)
            serving = session._attached.boundary.followers.find("arena")
            run.states.append(serving.state if serving is not None else None)
            counted = serving.step if serving is not None else None
            run.shares.append(counted.from_arena / max(1, counted.from_arena + counted.fallback) if counted else 0.0)
        run.report = session.report().as_dict()
        if run.states[-1] is State.SERVING:
            run.arena_bytes = session._attached.boundary.followers.find("arena").plan.predictions.arena_bytes
    run.losses.append(sum(parameter.double().sum().item() for parameter in network.parameters()))
    return run


def only_plan(folder: Path) -> Path:
    """The file that there is."""
    (file,) = folder.glob("*.json")
    return file


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A plan that nobody writes to, and the run that kept it."""
    folder = tmp_path_factory.mktemp("kept")
    first = train(folder)
    assert first.is_first() and first.report["resumed_from"] is None and first.report["not_resumed_because"] is None
    return only_plan(folder), first


@pytest.fixture
def folder(kept: tuple[Path, Run], tmp_path: Path) -> Path:
    """Of its own, with that plan."""
    mine = tmp_path / "plans"
    mine.mkdir()
    (mine / kept[0].name).write_bytes(kept[0].read_bytes())
    return mine


@pytest.mark.device
def test_the_second_run_is_planned_and_served_from_its_first_step(kept: tuple[Path, Run], folder: Path) -> None:
    content = only_plan(folder).read_bytes()
    second = train(folder)
    assert second.is_second() and second.losses == kept[1].losses
    assert min(second.shares) == 1.0, "from the first request on"
    assert second.report["resumed_from"] == str(only_plan(folder))
    assert second.report["arena_served"] > kept[1].report["arena_served"]
    assert only_plan(folder).read_bytes() == content


def test_the_plan_on_disk_is_what_ran(kept: tuple[Path, Run]) -> None:
    plan, report = plan_file.load(kept[0]), kept[1].report
    decisions, addresses = Decisions.of(plan), AddressPlan.of(plan)
    assert decisions is not None and addresses is not None and plan.training.program is not None
    assert sorted(decisions.settings) == ["model.layers.0", "model.layers.1"]
    assert decisions.solution.host_bytes == report["predicted_host_bytes"]
    assert addresses.predictions.arena_bytes == kept[1].arena_bytes
    names = plan.training.program.names
    assert "aten::mm" in names and len(plan.training.program.operators) > 200
    assert plan.fingerprint.inputs == ("int64[2, 16], int64[2, 16]",)
    assert not plan.training.gradients_stay


def test_a_mixture_goes_on_too(tmp_path: Path) -> None:
    first, second = (train(tmp_path, mixtral) for _ in range(2))
    assert first.report["resumed_from"] is None and second.is_second()
    assert second.losses == first.losses
    assert min(second.shares) > 0.9, "the choice of experts is another in each step"


def test_gradients_that_stay_take_no_address_of_what_does_not(tmp_path: Path) -> None:
    first, second = (train(tmp_path, keeps_gradients=True) for _ in range(2))
    assert plan_file.load(only_plan(tmp_path)).training.gradients_stay
    assert second.is_second() and second.losses == first.losses
    assert min(second.shares) == 1.0


def test_the_arena_alone_goes_on_too(tmp_path: Path) -> None:
    block = {"tokenwise": {"enabled": False}}
    first, second = (train(tmp_path, block=block) for _ in range(2))
    assert first.states[0] is not State.SERVING and set(second.states) == {State.SERVING}
    assert (second.report["arena_plans"], second.report["recorded_steps"]) == (0, 0)
    assert second.losses == first.losses and min(second.shares) == 1.0


def test_decisions_alone_go_on_too(tmp_path: Path) -> None:
    block = {"arena": {"enabled": False}}
    first, second = (train(tmp_path, block=block) for _ in range(2))
    assert first.stages[0] is Stage.WARM_UP and set(second.stages) == {second.before[0]} == {Stage.STABLE}
    assert (second.report["replans"], second.report["planned_steps"]) == (0, STEPS)
    assert second.losses == first.losses


def test_a_run_that_ends_before_it_has_addresses_leaves_its_decisions(tmp_path: Path) -> None:
    first = train(tmp_path, steps=4)
    assert first.stages[-1] is Stage.STABLE and State.SERVING not in first.states
    second, third = train(tmp_path), train(tmp_path)
    assert set(second.stages) == {second.before[0]} == {Stage.STABLE}
    assert (second.report["replans"], second.report["arena_plans"]) == (0, 1) and second.states[-1] is State.SERVING
    assert second.losses[:4] == first.losses[:4]
    assert third.is_second() and third.losses == second.losses
    only_plan(tmp_path)


def with_unknown_part(file: Path) -> dict[str, Any]:
    """Adds the part of a technique that is not there."""
    plan, part = plan_file.load(file), {"rows": [1, 2, 3]}
    plan_file.save(replace(plan, parts={**plan.parts, "later": part}), file)
    return part


def test_a_part_of_an_unknown_technique_is_left_alone_and_said_to_be_there(
    kept: tuple[Path, Run], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    part = with_unknown_part(only_plan(folder))
    with caplog.at_level(logging.WARNING, "memplug"):
        second = train(folder)
    assert second.is_second() and second.losses == kept[1].losses
    assert plan_file.load(only_plan(folder)).parts["later"] == part
    assert "has parts that no technique here reads: later" in caplog.text


def test_a_part_of_an_unknown_technique_outlasts_new_addresses_and_no_new_decisions(tmp_path: Path) -> None:
    train(tmp_path, steps=4)  # decisions alone
    part = with_unknown_part(only_plan(tmp_path))
    train(tmp_path)
    plan = plan_file.load(only_plan(tmp_path))
    assert sorted(plan.parts) == ["arena", "later", "tokenwise"] and plan.parts["later"] == part
    plan_file.save(replace(plan, fingerprint=replace(plan.fingerprint, device="other")), only_plan(tmp_path))
    train(tmp_path)  # as a first run
    assert sorted(plan_file.load(only_plan(tmp_path)).parts) == ["arena", "tokenwise"]


def test_every_program_of_the_first_run_is_known_in_the_second(tmp_path: Path) -> None:
    """Lengths change for good halfway."""
    halves = {"length": lambda step: 16 if step < 14 else 24, "steps": 28}
    first, second = (train(tmp_path, **halves) for _ in range(2))
    assert first.report["replans"] == first.report["arena_plans"] == 2 and len(list(tmp_path.glob("*.json"))) == 2
    assert second.report["replans"] == second.report["arena_plans"] == second.report["recorded_steps"] == 0
    assert second.losses == first.losses


# -- what differs ------------------------------------------------------------------------------------------------------


def wider() -> nn.Module:
    """Another model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes))


def change(file: Path, **fields: Any) -> None:
    """As if the plan had been made by another job; it stays where this one looks for its own."""
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


def of_more_host_memory(file: Path) -> None:
    plan = plan_file.load(file)
    decisions = Decisions.of(plan)
    larger = replace(decisions, solution=replace(decisions.solution, host_bytes=2**60))
    plan_file.save(plan.with_part(larger), file)


def lose(file: Path, what: str) -> None:
    plan = plan_file.load(file)
    parts = {name: part for name, part in plan.parts.items() if name != what}
    training = replace(plan.training, program=None) if what == "program" else plan.training
    plan_file.save(replace(plan, parts=parts, training=training), file)


def of_something_else(file: Path) -> None:
    plan = plan_file.load(file)
    plan_file.save(replace(plan, parts={**plan.parts, "swap": {"tensors": 3}}), file)


SPOILT: dict[str, tuple[Callable[[Path], None], str]] = {
    "world size": (lambda file: change(file, world_size=8), "world size 8, now 1"),
    "versions": (lambda file: change(file, versions=(("torch", "2.0.0"),)), "versions torch 2.0.0, now "),
    "layout": (lambda file: change(file, layout=(("zero_stage", 3),)), "layout zero_stage 3, now none"),
    "device": (lambda file: change(file, device="NVIDIA H200"), "device NVIDIA H200, now cpu"),
    "one bit": (flip, "not what was saved"),
    "its end": (cut_short, "not what was saved"),
    "addresses": (overlap, "the judge refuses it"),
    "host memory": (of_more_host_memory, "and the host budget is"),
    "no decisions": (lambda file: lose(file, "tokenwise"), "a program without decisions"),
    "no program": (lambda file: lose(file, "program"), "decisions without a program"),
    "a part": (of_something_else, "in its part swap"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_plan_that_does_not_hold_is_refused_with_the_reason(
    what: str, kept: tuple[Path, Run], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoil, reason = SPOILT[what]
    spoil(only_plan(folder))
    spoilt = only_plan(folder).read_bytes()
    with caplog.at_level(logging.INFO, "memplug"):
        run = train(folder)
    assert run.is_first() and run.losses == kept[1].losses
    assert reason in run.report["not_resumed_because"] and run.report["resumed_from"] is None
    assert f"begins as a first run: {run.report['not_resumed_because']}" in caplog.text
    assert only_plan(folder).read_bytes() != spoilt and plan_file.load(only_plan(folder))


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"model": wider}, "parameters 2"),
        ({"block": {"arena": {"planner": "search"}}}, 'another "memplug" block'),
        ({"block": {"profiler": {"warmup_steps": 1, "policy_steps": 0, "length_tolerance": 0.1}}}, '"memplug" block'),
    ],
)
def test_another_job_begins_as_a_first_run_and_says_how_it_differs(
    other: dict[str, Any], reason: str, folder: Path
) -> None:
    run = train(folder, **other)
    assert run.is_first() and reason in run.report["not_resumed_because"]
    assert len(list(folder.glob("*.json"))) == 2, "each has its own plan"


@pytest.mark.parametrize("other", [{"batch": 4}, {"batch": 1}, {"micro_batches": 2}, {"length": lambda step: 24}])
def test_other_inputs_are_noticed_in_the_first_step(other: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    run, first = train(folder, **other), train(tmp_path / "new", **other)
    assert run.losses == first.losses and run.stages == first.stages
    assert run.report["replans"] == run.report["arena_plans"] == 1
    assert run.report["resumed_from"] is None and "another program" in run.report["not_resumed_because"]
    assert len(list(folder.glob("*.json"))) == 2
    assert train(folder, **other).is_second(), "its own plan is the latest"


def test_inputs_that_hardly_differ_run_by_the_plan_from_the_second_step_on(
    folder: Path, kept: tuple[Path, Run], caplog: pytest.LogCaptureFixture
) -> None:
    loose = {"profiler": {**SMALL["profiler"], "length_tolerance": 0.5}}
    ours = folder.parent / "loose"
    train(ours, block=loose)
    with caplog.at_level(logging.WARNING, "memplug"):
        run = train(ours, length=lambda step: 17, block=loose)
    assert "is not used: it was made for inputs int64[2, 16]" in caplog.text
    assert set(run.stages) == {Stage.STABLE} and run.report["replans"] == 0 and run.report["resumed_from"]
    assert run.report["swapped_fraction"] == train(ours, block=loose).report["swapped_fraction"]
    assert run.report["offloaded_bytes"] > kept[1].report["offloaded_bytes"] // 2


def test_a_compiled_model_goes_on_too(tmp_path: Path) -> None:
    def compiled() -> nn.Module:
        network = llama()
        network.compile(backend="eager")
        return network

    block = {"tokenwise": {"enabled": False}}
    first, second = (train(tmp_path, compiled, block=block) for _ in range(2))
    assert second.losses == first.losses and set(second.states) == {State.SERVING}
    assert (second.report["arena_plans"], second.report["recorded_steps"]) == (0, 0)


def test_a_batch_that_changes_back_finds_its_plan_in_the_second_step(folder: Path) -> None:
    train(folder, batch=4)
    back = train(folder)
    assert back.stages[0] is Stage.STABLE and back.report["replans"] == back.report["arena_plans"] == 0


# -- ranks -------------------------------------------------------------------------------------------------------------


def ranks_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.distributed
def test_ranks_of_every_zero_stage_go_on_together(tmp_path: Path) -> None:
    """Each run in processes of its own."""
    block = {"enabled": True, **SMALL}
    cases = {
        str(stage): {
            "stage": stage,
            "memplug": {**block, "plan_dir": str(tmp_path / f"plans{stage}")},
            "lengths": [[12] * 12] * 2,
        }
        for stage in range(4)
    }
    runs = []
    for _ in range(2):
        launch_forked(["tests.support.training_worker", tmp_path, json.dumps(cases)], module=True)
        runs.append(ranks_of(tmp_path))
    for firsts, seconds in zip(*runs, strict=True):
        for stage in cases:
            first, second = firsts[stage], seconds[stage]
            assert first["stages"][0] == "warm-up" and first["report"]["arena_plans"] > 0, stage
            assert second["losses"] == first["losses"] and second["digest"] == first["digest"], stage
            assert second["stages"] == ["stable"] * 12, stage
            report = second["report"]
            made = report["replans"], report["arena_plans"], report["recorded_steps"], report["planned_steps"]
            assert made == (0, 0, 0, 12), stage
            assert min(second["served"]) > 0, stage


@pytest.mark.distributed
def test_where_one_rank_has_no_plan_all_begin_as_a_first_run(tmp_path: Path) -> None:
    case = {"stage": 1, "memplug": {"enabled": True, **SMALL, "plan_dir": str(tmp_path / "plans")}}
    case["lengths"] = [[12] * 10] * 2
    launch_forked(["tests.support.training_worker", tmp_path, json.dumps({"first": case})], module=True)
    files = sorted((tmp_path / "plans").glob("*.json"))
    assert [file.name.partition(".")[2] for file in files] == ["rank0.json", "rank1.json"]
    files[1].unlink()
    launch_forked(["tests.support.training_worker", tmp_path, json.dumps({"again": case})], module=True)
    for results in ranks_of(tmp_path):
        assert results["again"]["stages"][:3] == [each.value for each in FIRST]
        assert "of another rank than 1" in results["again"]["report"]["not_resumed_because"]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "layout", [{"tensor": 2}, pytest.param({"expert": 2, "experts": 8, "same": True}, marks=pytest.mark.long)]
)
def test_ranks_of_a_megatron_model_go_on_together(layout: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")
    steps = 14
    block = {"enabled": True, **SMALL, "plan_dir": str(tmp_path / "plans")}
    arguments = [json.dumps({**layout, "steps": steps}), json.dumps({"first": block, "second": block})]
    launch_forked(["tests.support.megatron_worker", tmp_path, *arguments], libraries="megatron", module=True)
    for rank in (0, 1):
        results = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        first, second = results["first"], results["second"]
        assert first["report"]["arena_plans"] > 0
        assert second["losses"] == first["losses"] and second["digests"] == first["digests"]
        report = second["report"]
        made = report["replans"], report["arena_plans"], report["recorded_steps"], report["planned_steps"]
        assert made == (0, 0, 0, steps)
        assert min(second["served"]) > 0
