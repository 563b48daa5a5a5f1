"""`memplug run` before other people's commands: the same losses, with the commands' own checkpointing replaced."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.parts import RUN, block, llama, sentences, tokenizer, write_ds
from tests.support.folders import ROOT

pytestmark = [pytest.mark.distributed, pytest.mark.long]


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
def test_trl_sft_on_two_ranks_has_the_same_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    llama().save_pretrained(model)
    tokenizer().save_pretrained(model)
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in sentences(64, 15)))
    options = {
        "model_name_or_path": model,
        "dataset_name": data,
        "max_steps": 8,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": "true",
        "bf16": "false",
        "disable_tqdm": "true",
        "dataloader_pin_memory": "false",
        "deepspeed": "ds.json",
        "num_processes": 2,
        "num_machines": 1,
    }
    command = [
        "trl",
        "sft",
        "--multi_gpu",
        *(str(word) for name, value in options.items() for word in (f"--{name}", value)),
    ]
    outputs = []
    for memplug in (None, block(alpha=1)):
        folder = tmp_path / ("plain" if memplug is None else "memplug")
        folder.mkdir()
        monkeypatch.chdir(folder)
        write_ds(memplug, stage=2)
        outputs.append(started([*command, "--output_dir", "out"]))
    plain, ours = outputs
    assert len(losses(plain)) == 8 and losses(ours) == losses(plain)
    assert "nothing was attached: the engine's configuration has no" in plain
    assert "2 regions, alpha 1.0" in ours and "nothing was attached" not in ours
    assert ours.count("replaces the script's checkpointing of regions (gradient_checkpointing)") == 1


def started(command: list[str]) -> str:
    """Run a command by `memplug run`, and return its output."""
    scripts = Path(sys.executable).parent
    path = {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    env = {**os.environ, **path, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([*RUN, *command], capture_output=True, text=True, env=env, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def losses(output: str) -> list[str]:
    return re.findall(r"'loss': '?([0-9.]+)", output)
