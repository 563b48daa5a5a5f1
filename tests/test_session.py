"""One attached model over its steps: stages, reports, budgets that run out, and the note on an out-of-memory error."""

from __future__ import annotations

import csv
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memplug
from memplug import report as reports
from memplug.session import Stage
from tests.blocks import Block, Stack, assert_same, gradients, twin
from tests.hosts import block, ds_config, make_engine, process_group, tiny_llama, tokens, train, train_engine

LAYERS = ["layers.*"]


@pytest.fixture
def cpu_engine(tmp_path: Path) -> Iterator[None]:
    with process_group(tmp_path):
        yield
    memplug.uninstall()


def train_stacks(model: nn.Module, reference: nn.Module, seed: int, exact: bool = True) -> None:
    """One step of both on the same data; raises AssertionError where gradients differ."""
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(seed))
    model(x).backward()
    reference(x).backward()
    assert_same(gradients(model), gradients(reference), exact)


# -- stages ------------------------------------------------------------------------------------------------------------


def test_auto_plans_after_two_steps_with_one_line_a_stage(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "memplug")
    model = tiny_llama()
    session = memplug.attach(model, block())
    stages = [session.stage]
    for _ in range(4):
        train(model)
        session.step()
        stages.append(session.stage)
    session.detach()
    assert stages == [Stage.WARM_UP, Stage.OBSERVE, Stage.STABLE, Stage.STABLE, Stage.STABLE]
    lines = [record.getMessage() for record in caplog.records if record.name == "memplug"]
    assert [line.split(":")[1].strip() for line in lines] == ["warm-up", "observe", "stable", "detached"]
    assert "3 regions" in lines[0] and "planned" in lines[2]


def test_other_ranks_than_the_first_log_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "memplug")
    monkeypatch.setattr("memplug.session.dist.is_initialized", lambda: True)
    monkeypatch.setattr("memplug.session.dist.get_rank", lambda: 1)
    memplug.attach(tiny_llama(), block()).detach()
    assert not caplog.records


@pytest.mark.parametrize("alpha", [0, 0.25, 1])
def test_a_number_for_alpha_is_stable_at_once_and_never_times_operators(alpha: float) -> None:
    model = tiny_llama()
    with memplug.attach(model, block(alpha=alpha)) as session:
        assert session.stage is Stage.STABLE
        for _ in range(3):
            assert not session.executor.timing and session.executor.on_frame is None
            train(model)
            session.step()
        assert session.solution is None
        assert session.report()["swapped_fraction"] == alpha


def test_a_step_without_forwards_postpones_the_plan() -> None:
    """A session may be attached long before training starts, and see steps of something else."""
    model = Stack()
    reference = twin(model)
    with memplug.attach(model, block(regions=LAYERS)) as session:
        for _ in range(4):
            session.step()
        assert session.stage is Stage.OBSERVE
        train_stacks(model, reference, 0)
        session.step()
        assert session.stage is Stage.STABLE
        train_stacks(model, reference, 1, exact=False)


class Drops(Stack):
    """Leaves out the layers in `dropped`, as layer drop does."""

    dropped: frozenset[int] = frozenset()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        for index, layer in enumerate(self.layers):
            x = x if index in self.dropped else layer(x)
        return x.square().mean()


def test_a_region_that_did_not_run_in_the_observed_step_stays_at_the_safe_setting() -> None:
    model = Drops()
    reference = twin(model)
    with memplug.attach(model, block(regions=LAYERS)) as session:
        train_stacks(model, reference, 0)
        session.step()
        model.dropped = reference.dropped = frozenset({1})
        train_stacks(model, reference, 1)
        session.step()
        assert session.stage is Stage.STABLE
        assert [region.plan is None for region in session.regions] == [False, True, False, False]
        model.dropped = reference.dropped = frozenset()
        for seed in range(2, 5):
            train_stacks(model, reference, seed, exact=False)
            session.step()
        assert session.report()["recomputed_in_full"] == 0


class Fickle(Block):
    """Runs other operators where `odd`."""

    odd = False

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        if self.odd:
            return x + self.down(nn.functional.gelu(self.gate(self.norm2(x)) + 1.0))
        return super().forward(x, scale)


def test_gradients_hold_where_a_region_runs_other_operators_every_step() -> None:
    model = Stack(4, Fickle)
    reference = twin(model)
    with memplug.attach(model, block(regions=LAYERS)) as session:
        for seed in range(8):
            for layer in (*model.layers[1:], *reference.layers[1:]):
                layer.odd = seed % 2 == 1
            train_stacks(model, reference, seed, exact=False)
            session.step()
        assert session.stage is Stage.STABLE
        assert len(session.solution.regions) == 2, "the first layer ran something else than the others"
        assert session.report()["recomputed_in_full"] == 0


@pytest.mark.parametrize("alpha", [0, 1, "auto"])
def test_a_host_budget_without_room_plans_and_trains_with_the_plain_gradients(alpha: Any) -> None:
    model = Stack()
    reference = twin(model)
    config = {**block(alpha=alpha, regions=LAYERS), "host_budget_gib": 1e-6}
    with memplug.attach(model, config) as session:
        assert session.report()["host_budget_bytes"] == int(1e-6 * 2**30)
        for seed in range(4):
            train_stacks(model, reference, seed)
            session.step()
        report = session.report()
        assert session.stage is Stage.STABLE
        assert report["host_peak_bytes"] <= report["host_pool_bytes"] <= report["host_budget_bytes"]
        assert report["host_refusals"] > 0
        if alpha == "auto":
            assert report["predicted_host_bytes"] <= report["host_budget_bytes"]


@pytest.mark.parametrize(("variable", "processes"), [("LOCAL_WORLD_SIZE", 4), ("LOCAL_SIZE", 8), (None, 1)])
def test_processes_of_a_machine_share_its_memory(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, processes: int
) -> None:
    """torchrun sets the one variable, DeepSpeed's launcher the other."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    monkeypatch.setattr("memplug.session.host_available_bytes", lambda: 80 << 30)
    if variable:
        monkeypatch.setenv(variable, str(processes))
    with memplug.attach(tiny_llama(), block()) as session:
        assert session.report()["host_budget_bytes"] == pytest.approx(0.8 * (80 << 30) / processes)


def test_gradient_accumulation_counts_optimizer_steps(cpu_engine: None) -> None:
    config = ds_config(1, gradient_accumulation_steps=3)
    expected = train_engine(make_engine(config), 4)
    memplug.install()
    engine = make_engine({**config, "memplug": block()})
    session = memplug.attach(engine)
    losses = train_engine(engine, 1)
    assert (session.steps, session.stage) == (1, Stage.OBSERVE)
    losses += train_engine(engine, 3, first=3)
    assert (session.steps, session.stage) == (4, Stage.STABLE)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert session.report()["forwards"] == 4 * 3 * 3


def test_the_caller_may_own_the_end_of_accumulation(cpu_engine: None) -> None:
    """With `managed_gradient_accumulation` off, DeepSpeed knows of the boundary only while `step` runs."""
    engine = make_engine(ds_config(1, block(), managed_gradient_accumulation=False))
    session = memplug.attach(engine)
    for seed in range(6):
        x = tokens(seed)
        engine.backward(engine(input_ids=x, labels=x).loss)
        if seed % 2:
            engine.step()
    assert (session.steps, session.stage) == (3, Stage.STABLE)


def test_plain_backward_calls_are_enough(cpu_engine: None) -> None:
    """Newer DeepSpeed needs no `engine.backward`."""
    expected = train_engine(make_engine(ds_config(1)), 3)
    engine = make_engine(ds_config(1, block(alpha=1)))
    session = memplug.attach(engine)
    losses = []
    for seed in range(3):
        x = tokens(seed)
        loss = engine(input_ids=x, labels=x).loss
        loss.backward()
        engine.step()
        losses.append(loss.item())
    assert losses == expected
    assert session.steps == 3


def test_a_pipeline_engine_marks_its_steps(cpu_engine: None) -> None:
    from deepspeed.pipe import PipelineModule

    def losses(memplug_block: dict[str, Any] | None) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        layers = [Block() for _ in range(3)]
        module = PipelineModule(layers, num_stages=1, loss_fn=lambda y, target: (y - target).square().mean())
        engine = make_engine(ds_config(0, memplug_block, gradient_accumulation_steps=2), module)
        session = memplug.attach(engine)
        batches = iter(torch.randn(16, 2, 2, 6, 16, generator=torch.Generator().manual_seed(1)))
        return [engine.train_batch(batches).item() for _ in range(4)], session

    expected, _ = losses(None)
    measured, session = losses(block(alpha="auto", regions=["[0-9]"]))
    assert measured == pytest.approx(expected, rel=1e-5)
    assert (session.steps, session.stage) == (4, Stage.STABLE)
    assert session.report()["forwards"] == 4 * 2 * 3


def test_two_forwards_before_one_backward_are_planned_as_two_in_flight() -> None:
    model = Stack()
    reference = twin(model)
    x, y = torch.randn(2, 2, 6, 16)
    with memplug.attach(model, block(regions=LAYERS)) as session:
        for _ in range(4):
            (model(x) + model(y)).backward()
            (reference(x) + reference(y)).backward()
            assert_same(gradients(model), gradients(reference), exact=False)
            session.step()
        (planned,) = session.solution.regions.values()
        assert sum(group.instances for group in planned.groups) == 2 * 4


# -- reports -----------------------------------------------------------------------------------------------------------


def test_the_keys_of_a_report_are_the_same_in_every_stage_and_its_numbers_are_sane() -> None:
    model = tiny_llama()
    session = memplug.attach(model, block())
    seen = [session.report()]
    for _ in range(4):
        train(model)
        session.step()
        seen.append(session.report())
    session.detach()
    seen.append(session.report())
    assert len({tuple(report) for report in seen}) == 1
    assert seen[0]["step_s"] is None and seen[0]["predicted_regions_s"] is None
    planned = seen[4]
    assert planned["steps"] == 4 and planned["regions"] == 3 and planned["forwards"] == 12
    assert planned["forwards_in_flight"] == 0 and planned["fetched_bytes"] == 0 and planned["host_used_bytes"] == 0
    assert planned["recomputed_in_full"] == planned["host_refusals"] == 0
    assert 0 <= planned["swapped_fraction"] <= 1
    assert 0 < planned["predicted_regions_s"] < 10
    assert 0 < planned["host_peak_bytes"] <= planned["host_pool_bytes"] <= planned["host_budget_bytes"]
    assert planned["predicted_kept_bytes"] == 0, "on the CPU there is no device memory to keep anything in"
    for before, after in zip(seen[:4], seen[1:5], strict=True):
        assert after["offloaded_bytes"] > before["offloaded_bytes"]
    assert seen[-1]["stage"] == "detached" and seen[-1]["host_pool_bytes"] == 0


def test_the_plan_predicts_the_host_bytes_that_the_next_step_needs() -> None:
    model = tiny_llama(layers=6)
    with memplug.attach(model, block()) as session:
        for _ in range(2):
            train(model)
            session.step()
        pool = session.executor.pool
        pool.peak_bytes = 0
        train(model)
        predicted = session.report()["predicted_host_bytes"]
        assert 0 < pool.peak_bytes <= 1.1 * predicted + 512 * 6 * 20, "slots are rounded up to 512 bytes"
        assert pool.peak_bytes >= 0.6 * predicted, "the last two regions need not have left"


def test_host_memory_of_the_plan_is_there_before_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registering memory takes long: no step shall wait for it."""
    monkeypatch.setattr("memplug.execute.host_pool.SMALLEST_SLAB_BYTES", 1)
    model = tiny_llama()
    with memplug.attach(model, block()) as session:
        for _ in range(2):
            train(model)
            session.step()
        report = session.report()
        assert report["host_pool_bytes"] >= report["predicted_host_bytes"] > report["host_peak_bytes"]


def test_step_time_is_the_median_from_step_to_step() -> None:
    with memplug.attach(tiny_llama(), block(alpha=0)) as session:
        for pause_s in (0.0, 0.02, 0.2, 0.02):
            time.sleep(pause_s)
            session.step()
        assert 0.02 <= session.report()["step_s"] < 0.1


@pytest.mark.parametrize("monitored", [True, False])
def test_numbers_reach_the_monitor_that_deepspeed_writes(cpu_engine: None, tmp_path: Path, monitored: bool) -> None:
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    config = {**block(), "report": {"monitor": monitored}}
    engine = make_engine(ds_config(memplug=config, csv_monitor=monitor))
    session = memplug.attach(engine)
    train_engine(engine, 4)
    files = {path.name: path for path in tmp_path.glob("job/*memplug*.csv")}
    if not monitored:
        assert not files
        return
    with open(files["Train_memplug_forwards.csv"]) as file:
        rows = list(csv.reader(file))[1:]
    assert [(int(step), float(value)) for step, value in rows] == [(2, 3.0), (4, 6.0), (6, 9.0), (8, 12.0)]
    numbers = {f"Train_memplug_{k}.csv" for k, v in session.report().items() if isinstance(v, (int, float))}
    assert numbers <= files.keys()
    assert not any("stage" in name or "bound" in name for name in files)


# -- out of memory -----------------------------------------------------------------------------------------------------


class RunsOut(nn.Module):
    """A block whose forward runs out of memory at the given call, and whose input's gradient does where asked."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.calls = 0
        self.fails_at = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self.inner(x)


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")


def note_of(error: BaseException) -> str:
    (note,) = error.__notes__
    return note


def check_note(note: str, phase: str, region: str | None) -> None:
    first = note.splitlines()[0]
    assert f"out of memory in {phase}" in first
    assert (f"of region {region}" in first) if region else ("region" not in first)
    assert "predicted" in note and "measured" in note
    assert "memplug holds on the device" in note and "memplug holds on the host" in note
    assert [line.strip()[:2] for line in note.splitlines() if line.strip()[:2] in ("1.", "2.", "3.")] == [
        "1.",
        "2.",
        "3.",
    ]
    for change in ("device_budget_gib", "host_budget_gib", '"alpha": 0', "micro-batch"):
        assert change in note


@pytest.mark.parametrize("alpha", [0, "auto"])
@pytest.mark.parametrize(("phase", "fails_at"), [("forward", 1), ("recompute", 2)])
def test_running_out_of_memory_in_a_region_is_explained_once(phase: str, fails_at: int, alpha: Any) -> None:
    model = Stack(3, RunsOut)
    model.layers[1].fails_at = fails_at
    with memplug.attach(model, block(alpha=alpha, regions=LAYERS)):
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 2.00 GiB") as error:
            model(torch.randn(2, 6, 16)).backward()
        check_note(note_of(error.value), phase, "layers.1")


def test_training_goes_on_after_running_out_of_memory() -> None:
    model = Stack(3, RunsOut)
    reference = twin(model)
    model.layers[1].fails_at = 2
    with memplug.attach(model, block(regions=LAYERS)) as session:
        with pytest.raises(torch.OutOfMemoryError):
            model(torch.randn(2, 6, 16)).backward()
        model.zero_grad()
        for seed in range(4):
            train_stacks(model, reference, seed, exact=False)
            session.step()
        report = session.report()
        assert report["stage"] == "stable" and report["fetched_bytes"] == report["host_used_bytes"] == 0


@pytest.mark.parametrize("where", ["recompute", "backward", "step"])
def test_running_out_of_memory_in_an_engine_is_explained_once(
    cpu_engine: None, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Stack(3, RunsOut)
    engine = make_engine(ds_config(memplug=block(alpha=0, regions=LAYERS)), model)
    memplug.attach(engine)
    if where == "recompute":
        model.layers[1].fails_at = 2
    if where == "step":
        monkeypatch.setattr(engine.optimizer, "step", lambda *args, **kwargs: FailsInBackward.backward(None, None))
    loss = engine(torch.randn(2, 6, 16))
    loss = FailsInBackward.apply(loss) if where == "backward" else loss
    with pytest.raises(torch.OutOfMemoryError) as error:
        engine.backward(loss)
        engine.step()
    check_note(note_of(error.value), where, "layers.1" if where == "recompute" else None)


def test_the_note_holds_predicted_and_measured_bytes() -> None:
    with memplug.attach(tiny_llama(), block()) as session:
        known = {
            **session.report(),
            "predicted_peak_bytes": 70 << 30,
            "predicted_kept_bytes": 5 << 30,
            "fetched_bytes": 3 << 30,
            "host_used_bytes": 11 << 30,
            "host_budget_bytes": 12 << 30,
            "forwards_in_flight": 13,
        }
    note = reports.out_of_memory_note("recompute", "model.layers.7", known, 75 << 30)
    for text in ("model.layers.7", "70.00 GiB", "75.00 GiB", "5.00 GiB kept", "3.00 GiB fetched", "11.00 GiB of 12.00"):
        assert text in note
    assert "13 region forwards" in note


def test_other_errors_get_no_note() -> None:
    model = Stack()
    with memplug.attach(model, block(regions=LAYERS)), pytest.raises(RuntimeError) as error:
        model(torch.randn(2, 6, 15))
    assert not getattr(error.value, "__notes__", [])
