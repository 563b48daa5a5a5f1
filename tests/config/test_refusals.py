"""Unusable files, numbers and folders of users end in a MemplugError with advice, or in a warning beside training."""

from __future__ import annotations

import errno
import io
import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memplug
from memplug.arena.arena import Arena
from memplug.arena.plan.problem_file import read_csv
from memplug.config import load_config
from memplug.errors import (
    ArenaError,
    ConfigError,
    EstimateError,
    HardwareError,
    MemplugError,
    RecomputeError,
    RecorderError,
    TuneError,
)
from memplug.files import opened
from memplug.predict.estimator.shapes import Shape
from memplug.predict.estimator.values import Values
from memplug.predict.tune import tuning
from memplug.predict.tune.fixed import Fixed
from memplug.predict.tune.machine import Machine
from memplug.predict.virtual import GpuProfile
from memplug.profile.allocator_history import is_snapshot
from memplug.profile.allocator_history import load as load_snapshot
from memplug.profile.trace_file import load as load_trace
from tests.support.folders import ROOT

TOO_DEEP = "[" * 100_000
TOO_LONG = "x" * 300  # too long for a file name: even checking whether it exists fails
BLOCK = {
    "enabled": True,
    "plan_dir": False,
    "profiler": {"warmup_steps": 0, "policy_steps": 1, "wait_for_plans": True},
    "tokenwise": {"regions": ["[0-9]"], "min_offload_bytes": 1},
}


def train(block: dict[str, Any], steps: int = 8) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2)))
    with memplug.attach(model, {**BLOCK, **block}) as session:
        for _ in range(steps):
            model(torch.ones(4, 16)).sum().backward()
            session.step()


def test_deeply_nested_json_is_refused(tmp_path: Path):
    file = tmp_path / "ds.json"
    file.write_text(TOO_DEEP)
    with pytest.raises(ConfigError, match="nested too deeply"):
        load_config(file)
    with pytest.raises(HardwareError):
        GpuProfile.read(file)


NO_PATHS = [5, None, ["x"], b"abc", "a\0b", Path("a\0b")]


@pytest.mark.parametrize("given", NO_PATHS, ids=repr)
def test_invalid_paths_are_refused(given: Any):
    readers = [memplug.load_plan, load_trace, Values.read, GpuProfile.named, is_snapshot, load_snapshot, read_csv]
    for read in readers:
        with pytest.raises(MemplugError, match="is not the path of a .*\nWhat to do: Give it as text"):
            read(given)
    with pytest.raises(EstimateError, match="is not the path of a"), memplug.record_values(nn.Identity(), given):
        pytest.fail("nothing is recorded that cannot be kept")
    if given is not None:
        with pytest.raises(EstimateError, match="is not the path of a folder of plans"):
            memplug.estimate(nn.Identity, tuple, BLOCK, modes=["memplug"], plan_dir=given)
        with pytest.raises(MemplugError):
            load_config(given)
        with memplug.attach(nn.Sequential(nn.Linear(2, 2)), BLOCK) as session:
            with pytest.raises(RecorderError, match="is not the path of a trace"):
                session.record(given)


@pytest.mark.parametrize("given", [*NO_PATHS, "", " "], ids=repr)
@pytest.mark.parametrize("field", ["plan_dir", "timeline", "snapshot_on_oom"])
def test_invalid_folder_names_are_refused(field: str, given: Any):
    value = {field: given} if field == "plan_dir" else {"report": {field: given}}
    with pytest.raises(ConfigError, match=f"{field}: got .*the name of a folder"):
        load_config({"enabled": True, **value})


def test_readers_refuse_folders_and_unreadable_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "file"
    file.write_text("1")
    readers = [memplug.load_plan, load_trace, Values.read, is_snapshot, load_snapshot, read_csv]
    for read in [*readers, GpuProfile.named, load_config, Shape.read]:
        with pytest.raises(MemplugError, match="not a file|no GPU|Is a directory"):
            read(tmp_path)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(io, "open", refuse)
    for read in [*readers, GpuProfile.named, load_config, Shape.read]:
        with pytest.raises(MemplugError, match="Permission denied"):
            read(file)


def test_gpu_profile_is_found_by_path_and_name():
    path = ROOT / "configs/hardware/h100.json"
    assert GpuProfile.named(path) == GpuProfile.named(str(path)) == GpuProfile.named("H100")


def test_path_with_null_byte_is_refused():
    with pytest.raises(MemplugError, match="null"):
        opened(Path("a\0b"), "plan", MemplugError)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_gpu_profile_with_non_finite_number_is_refused(value: float, tmp_path: Path):
    profile = json.loads((ROOT / "configs/hardware/h100.json").read_text())
    profile["memory_bytes"]["value"] = value
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps(profile))
    with pytest.raises(HardwareError, match="memory_bytes"):
        GpuProfile.read(file)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_non_finite_number_in_deepspeed_json_is_refused(value: float):
    with pytest.raises(TuneError, match="train_batch_size"):
        Fixed.of({"train_batch_size": value}, load_config(None), None)


@pytest.mark.parametrize("host_bytes", [math.inf, math.nan, -1.0])
def test_tune_refuses_impossible_host_memory(host_bytes: float):
    machine = Machine(hardware=GpuProfile.named("h100"), gpus=1)
    with pytest.raises(TuneError, match="host memory"):
        tuning.tune({}, Shape.read(ROOT / "configs/models/tiny.yaml"), machine, host_bytes)


@pytest.mark.parametrize("host_bytes", [math.nan, -1.0])
def test_estimate_refuses_impossible_host_memory(host_bytes: float):
    with pytest.raises(EstimateError, match="host memory"):
        memplug.estimate(nn.Identity, tuple, {"enabled": True}, modes=["keep"], host_bytes=host_bytes)


@pytest.mark.parametrize(
    "field",
    [
        "hidden_act: none of them",
        "rope_scaling: {rope_type: none, factor: 2.0}",
        "rms_norm_eps: [1]",
    ],
)
def test_shape_that_transformers_rejects_is_refused(field: str, tmp_path: Path):
    tiny = (ROOT / "configs/models/tiny.yaml").read_text().splitlines()
    kept = [line for line in tiny if line.split(":")[0] != field.split(":")[0]]
    file = tmp_path / "model.yaml"
    file.write_text("\n".join([*kept, field]))
    with pytest.raises(EstimateError, match="transformers cannot make a Llama from it"):
        Shape.read(file)


@pytest.mark.parametrize("budget", ["host_budget_gib", "device_budget_gib"])
def test_huge_budgets_are_accepted(budget: str):
    train({budget: 1e300})


def test_unreadable_plan_folder_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "memplug"):
        train({"plan_dir": str(tmp_path / TOO_LONG)})
    assert "plan" in caplog.text


def test_unreadable_timeline_folder_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "memplug"):
        train({"report": {"timeline": str(tmp_path / TOO_LONG)}})
    assert "was not saved" in caplog.text


@pytest.mark.parametrize("take", ["resize", "data"])
def test_weight_memory_freed_before_backward_raises(take: str):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2)))
    with memplug.attach(model, {**BLOCK, "tokenwise": {**BLOCK["tokenwise"], "alpha": 0.0}}):
        loss, weight = model(torch.ones(4, 16)).sum(), model[1][0].weight
        if take == "resize":
            weight.untyped_storage().resize_(0)
        else:
            weight.data = torch.empty(0)
        with pytest.raises(RecomputeError, match="was freed or replaced") as raised:
            loss.backward()
    assert "until its backward is over" in raised.value.advice


def test_arena_error_quotes_the_reason_why_it_cannot_serve(monkeypatch: pytest.MonkeyPatch):
    arena = Arena("cpu")

    def refuse(on: bool) -> None:
        raise RuntimeError("the CPU's allocator was set by another library with a higher priority")

    monkeypatch.setattr(arena, "_stand_in_front", refuse)
    with pytest.raises(ArenaError, match="set by another library") as raised:
        arena.serve(SimpleNamespace(reused_bytes=512, kept_bytes=0))
    assert "device_budget_gib" not in raised.value.advice
