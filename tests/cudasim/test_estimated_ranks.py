"""A DeepSpeed run on two ranks uses, from its first step on, the plan that `memplug estimate --gpus 2` wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cudasim.forked import ranks_on_cuda
from tests.support.folders import ROOT
from tests.support.planned_ranks_worker import STEPS

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]
SEQ_LEN = 128
SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def ds_config(stage: int, plan_dir: Path) -> dict[str, Any]:
    """Return a configuration with 32 sequences for each rank and step, and a budget that makes memplug swap."""
    return {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 16,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "reduce_bucket_size": 50000,
            "allgather_bucket_size": 50000,
            "stage3_param_persistence_threshold": 0,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "memplug": {
            "enabled": True,
            "plan_dir": str(plan_dir),
            "device_budget_gib": 0.016,
            "host_budget_gib": 1,
            "swap": {"enabled": False},
        },
    }


@pytest.fixture(scope="module")
def launch() -> Iterator[Callable[..., str]]:
    """Yield a function that runs a module on ranks."""
    with ranks_on_cuda("deepspeed") as launch:
        yield launch


def estimate(folder: Path) -> None:
    """Write the plan for a GPU with this GPU's name, in a process without CUDA."""
    hardware = json.loads((ROOT / "configs" / "hardware" / "h200.json").read_text())
    (folder / "gpu.json").write_text(json.dumps({**hardware, "name": torch.cuda.get_device_name()}))
    asked = [folder / "ds.json", "--model", folder / "model.yaml", "--gpu", folder / "gpu.json", "--gpus", 2]
    options = ["--seq-len", SEQ_LEN, "--mode", "memplug", "--plan-dir", folder / "plans"]
    command = [sys.executable, "-c", "from memplug.cli import main; main()", "estimate", *asked, *options]
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    told = subprocess.run(map(str, command), capture_output=True, text=True, cwd=ROOT, env=env, timeout=900)
    assert told.returncode == 0, told.stderr


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.long)])
def test_ranks_start_with_the_estimated_plan_in_both_runs(
    stage: int, tmp_path: Path, launch: Callable[..., str]
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(ds_config(stage, tmp_path / "plans")))
    (tmp_path / "model.yaml").write_text(json.dumps(SHAPE))
    estimate(tmp_path)
    first, second = sorted((tmp_path / "plans").glob("*.json"))
    assert first.name.endswith(".rank0.json") and second.name.endswith(".rank1.json")
    assert second.is_symlink() and second.samefile(first)
    arguments = [tmp_path, tmp_path / "ds.json", tmp_path / "model.yaml", str(SEQ_LEN)]
    launch(["tests.support.planned_ranks_worker", *arguments], module=True, time_limit_s=600)
    for rank in range(2):
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        for name in ("with", "again"):
            report = results[name]["report"]
            assert report["not_resumed_because"] is None, (rank, name)
            assert report["planned_steps"] == STEPS and report["replans"] == 0, (rank, name)
            assert report["arena_step_served"] > 0.9 and report["offloaded_bytes"] > 0, (rank, name)
            assert results[name]["losses"] == results["without"]["losses"], (rank, name)
            assert results[name]["violations"] == 0, (rank, name)
