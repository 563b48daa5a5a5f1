"""A session's texts about itself: its report, DeepSpeed's monitor, and the note on an out-of-memory error."""

from __future__ import annotations

import csv
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memplug
from memplug.session import out_of_memory
from tests.support.blocks import LAYERS, Block, Stack, train_stacks, twin
from tests.support.failing import Failing, MayFail
from tests.support.hosts import block, ds_config, make_engine, tiny_llama, train, train_engine


def test_report_has_the_same_keys_in_every_stage_and_sane_numbers() -> None:
    model = tiny_llama()
    session = memplug.attach(model, block())
    seen = [session.report().as_dict()]
    for _ in range(4):
        train(model)
        session.step()
        seen.append(session.report().as_dict())
    session.detach()
    seen.append(session.report().as_dict())
    assert len({tuple(report) for report in seen}) == 1
    assert seen[0]["step_s"] is None and seen[0]["predicted_regions_s"] is None
    planned = seen[4]
    assert planned["steps"] == 4 and planned["regions"] == 3 and planned["forwards"] == 12
    assert (
        planned["forwards_in_flight"] == 0 and planned["prefetched_live_bytes"] == 0 and planned["host_used_bytes"] == 0
    )
    assert planned["recomputed_in_full"] == planned["host_refusals"] == 0
    assert 0 <= planned["swapped_fraction"] <= 1
    assert 0 < planned["predicted_regions_s"] < 10
    assert 0 < planned["host_peak_bytes"] <= planned["host_pool_bytes"] <= planned["host_budget_bytes"]
    assert planned["predicted_kept_bytes"] == 0, "on the CPU there is no device memory to keep anything in"
    for before, after in zip(seen[:4], seen[1:5], strict=True):
        assert after["offloaded_bytes"] > before["offloaded_bytes"]
    assert seen[-1]["stage"] == "detached" and seen[-1]["host_pool_bytes"] == 0


def test_plan_predicts_host_bytes_of_the_next_step() -> None:
    model = tiny_llama(layers=6)
    with memplug.attach(model, block()) as session:
        for _ in range(2):
            train(model)
            session.step()
        pool = session._attached.executor.pool
        pool.rows.peak_bytes = 0
        train(model)
        predicted = session.report().tokenwise.predicted_host_bytes
        assert 0 < pool.peak_bytes <= 1.1 * predicted + 512 * 6 * 20, "slots are rounded up to 512 bytes"
        assert pool.peak_bytes >= 0.6 * predicted, "the last two regions may still be resident"


def test_planned_host_memory_is_registered_before_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    # registering memory takes long, so it must not delay the step that needs the memory
    monkeypatch.setattr("memplug.device.host_pool.SMALLEST_SLAB_BYTES", 1)
    model = tiny_llama()
    with memplug.attach(model, block()) as session:
        for _ in range(2):
            train(model)
            session.step()
        report = session.report().tokenwise
        assert report.host_pool_bytes >= report.predicted_host_bytes > report.host_peak_bytes


def test_reported_step_time_is_the_median_time_between_step_calls() -> None:
    with memplug.attach(tiny_llama(), block(alpha=0)) as session:
        for pause_s in (0.0, 0.02, 1.0, 0.02):
            time.sleep(pause_s)
            session.step()
        assert 0.02 <= session.report().step_s < 0.5


@pytest.mark.parametrize("monitored", [True, False])
def test_report_numbers_reach_deepspeeds_monitor(cpu_engine: None, tmp_path: Path, monitored: bool) -> None:
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
    numbers = {f"Train_memplug_{k}.csv" for k, v in session.report().as_dict().items() if isinstance(v, (int, float))}
    assert numbers <= files.keys()
    assert not any("stage" in name or "bound" in name for name in files)


# -- out of memory -----------------------------------------------------------------------------------------------------


class RunsOut(nn.Module):
    """A layer that can run out of memory if `fails` is set, in its forward or in its recompute pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        return MayFail.apply(x) if self.fails else x


def run_out(model: nn.Module, fails_at: int) -> None:
    """Make the second layer run out of memory at its call number `fails_at`."""
    model.layers[1].fails = True
    Failing.arm(fails_at, lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))


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
def test_out_of_memory_in_a_region_is_explained_once(phase: str, fails_at: int, alpha: Any) -> None:
    model = Stack(3, RunsOut)
    run_out(model, fails_at)
    with memplug.attach(model, block(alpha=alpha, regions=LAYERS)):
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 2.00 GiB") as error:
            model(torch.randn(2, 6, 16)).backward()
        check_note(note_of(error.value), phase, "layers.1")


def test_training_goes_on_after_out_of_memory() -> None:
    model = Stack(3, RunsOut)
    run_out(model, 2)
    reference = twin(model)
    with memplug.attach(model, block(regions=LAYERS)) as session:
        with pytest.raises(torch.OutOfMemoryError):
            model(torch.randn(2, 6, 16)).backward()
        model.zero_grad()
        Failing.arm(0)
        for seed in range(4):
            train_stacks(model, reference, seed, exact=False)
            session.step()
        report = session.report()
        assert (
            report.stage == "stable" and report.tokenwise.prefetched_live_bytes == report.tokenwise.host_used_bytes == 0
        )


@pytest.mark.parametrize("where", ["recompute", "backward", "step"])
def test_out_of_memory_in_an_engine_is_explained_once(
    cpu_engine: None, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Stack(3, RunsOut)
    engine = make_engine(ds_config(memplug=block(alpha=0, regions=LAYERS)), model)
    memplug.attach(engine)
    if where == "recompute":
        run_out(model, 2)
    if where == "step":
        monkeypatch.setattr(engine.optimizer, "step", lambda *args, **kwargs: FailsInBackward.backward(None, None))
    loss = engine(torch.randn(2, 6, 16))
    loss = FailsInBackward.apply(loss) if where == "backward" else loss
    with pytest.raises(torch.OutOfMemoryError) as error:
        engine.backward(loss)
        engine.step()
    check_note(note_of(error.value), where, "layers.1" if where == "recompute" else None)


def test_out_of_memory_note_has_predicted_and_measured_bytes() -> None:
    with memplug.attach(tiny_llama(), block()) as session:
        known = session.report()
    held = replace(
        known.tokenwise,
        predicted_peak_bytes=70 << 30,
        predicted_kept_bytes=5 << 30,
        prefetched_live_bytes=3 << 30,
        host_used_bytes=11 << 30,
        host_budget_bytes=12 << 30,
        forwards_in_flight=13,
    )
    known = replace(known, techniques={**known.techniques, "tokenwise": held})
    note = out_of_memory.note("recompute", "model.layers.7", known, 75 << 30)
    for text in (
        "model.layers.7",
        "70.00 GiB",
        "75.00 GiB",
        "5.00 GiB kept",
        "3.00 GiB prefetched",
        "11.00 GiB of 12.00",
    ):
        assert text in note
    assert "13 region forwards" in note


@pytest.mark.parametrize(
    ("asked_gib", "is_bound", "advice"),
    [
        ("auto", False, 'set "device_budget_gib" below the memory of the device'),
        ("auto", True, 'set "device_budget_gib" below the memory of the device'),
        (2.5, False, 'lower "device_budget_gib", which is 2.5'),
        (2.5, True, 'raise "device_budget_gib", which is 2.5'),
    ],
)
def test_note_advises_to_lower_or_raise_the_device_budget_as_needed(
    asked_gib: Any, is_bound: bool, advice: str
) -> None:
    with memplug.attach(tiny_llama(), block()) as session:
        report = session.report()
    note = out_of_memory.note("forward", None, report, None, asked_gib, is_bound)
    assert f"    1. {advice}" in note and note.count("device_budget_gib") == 1


def test_errors_other_than_out_of_memory_get_no_note() -> None:
    model = Stack()
    with memplug.attach(model, block(regions=LAYERS)), pytest.raises(RuntimeError) as error:
        model(torch.randn(2, 6, 15))
    assert not getattr(error.value, "__notes__", [])
