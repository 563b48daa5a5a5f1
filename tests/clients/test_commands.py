"""`memplug run` before other people's commands: the same losses, with the commands' own checkpointing replaced."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.parts import RUN, block, llama, sentences, tokenizer, write_ds
from tests.support.folders import ROOT

pytestmark = [pytest.mark.distributed, pytest.mark.long]
needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
REWARD = """
def letters(completions, **others):
    return [float(sum(map(ord, text)) % 7) for text in completions]
"""
LLAMA_FACTORY = ("llamafactory", "torchaudio", "omegaconf", "av")
"""LLaMA-Factory and modules that it imports at once; pip may leave them out, since its pins exclude newer releases."""


@needs_trl
def test_trl_sft_on_two_ranks_has_the_same_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_inputs(tmp_path, "sft")
    options = {**trl_options(tmp_path), "max_steps": 8, "deepspeed": "ds.json", "num_processes": 2, "num_machines": 1}
    command = ["trl", "sft", "--multi_gpu", *words(options)]
    outputs = []
    for memplug in (None, block(alpha=1)):
        enter(tmp_path / ("plain" if memplug is None else "memplug"), monkeypatch)
        write_ds(memplug, stage=2)
        outputs.append(started([*RUN, *command]))
    plain, ours = outputs
    assert len(losses(plain)) == 8 and losses(ours) == losses(plain)
    assert "nothing was attached: the engine's configuration has no" in plain
    assert_attached(ours)


@needs_trl
@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_trl_without_deepspeed_has_the_same_losses(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_inputs(tmp_path, method)
    options = trl_options(tmp_path)
    if method == "grpo":
        (tmp_path / "rewards.py").write_text(REWARD)
        options |= {"reward_funcs": "rewards.letters", "per_device_train_batch_size": 4, "num_generations": 4}
        options |= {"max_completion_length": 8}
    assert_same_losses(["trl", method, *words(options)], tmp_path, monkeypatch)


@pytest.mark.parametrize("tuned", ["full", "lora"])
def test_llama_factory_has_the_same_losses(tuned: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = [name for name in LLAMA_FACTORY if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"LLaMA-Factory needs {', '.join(missing)}: pip install llamafactory (it pins older transformers)")
    write_inputs(tmp_path, "llama_factory")
    data = tmp_path / "data"
    (data / "dataset_info.json").write_text(json.dumps({"tiny": {"file_name": "train.jsonl"}}))
    options = {
        "model_name_or_path": str(tmp_path / "model"),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": tuned,
        "dataset": "tiny",
        "dataset_dir": str(data),
        "template": "empty",
        "cutoff_len": 32,
        "output_dir": "out",
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        **({"lora_rank": 4, "lora_target": "all"} if tuned == "lora" else {}),
    }
    (tmp_path / "train.yaml").write_text(json.dumps(options))  # JSON is YAML
    assert_same_losses(["llamafactory-cli", "train", str(tmp_path / "train.yaml")], tmp_path, monkeypatch)


def assert_same_losses(command: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command of a Trainer without DeepSpeed, alone and by `memplug run --config`; both train the same."""
    enter(folder / "plain", monkeypatch)
    plain = started(command, folder)
    enter(folder / "memplug", monkeypatch)
    Path("block.json").write_text(json.dumps(block(alpha=1)))
    ours = started([*RUN, "--config", "block.json", *command], folder)
    assert len(losses(plain)) == 6 and losses(ours) == losses(plain)
    assert_attached(ours)


def assert_attached(output: str) -> None:
    """Check that memplug attached to one model, and took its checkpointing over."""
    assert output.count("2 regions, alpha 1.0") == 1 and "nothing was attached" not in output
    assert output.count("replaces the script's checkpointing of regions (gradient_checkpointing)") == 1


def write_inputs(folder: Path, kind: str) -> None:
    """Write a model with its tokenizer, and data of the form that a kind of training takes."""
    llama().save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    texts = sentences(96, 12)
    first, second, third = texts[::3], texts[1::3], texts[2::3]
    rows: dict[str, list[dict[str, str]]] = {
        "sft": [{"text": text} for text in texts],
        "dpo": [{"prompt": a, "chosen": b, "rejected": c} for a, b, c in zip(first, second, third, strict=True)],
        "grpo": [{"prompt": text} for text in texts],
        "llama_factory": [{"instruction": a, "input": "", "output": b} for a, b in zip(first, second, strict=True)],
    }
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows[kind])))


def trl_options(folder: Path) -> dict[str, Any]:
    """Return the options of a TRL command that trains for six steps on the CPU."""
    return {
        "model_name_or_path": folder / "model",
        "dataset_name": folder / "data",
        "output_dir": "out",
        "max_steps": 6,
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
    }


def words(options: dict[str, Any]) -> list[str]:
    """Return options as the words of a command."""
    return [str(word) for name, value in options.items() for word in (f"--{name}", value)]


def enter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a folder and enter it."""
    folder.mkdir()
    monkeypatch.chdir(folder)


def started(command: list[str], folder: Path = ROOT) -> str:
    """Run a command to its end, and return its output; its processes find the modules of `folder`."""
    scripts = Path(sys.executable).parent
    path = {
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([str(ROOT), str(folder)])),
    }
    env = {**os.environ, **path, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "DISABLE_VERSION_CHECK": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def losses(output: str) -> list[str]:
    return re.findall(r"'loss': '?(-?[0-9.e-]+)", output)
