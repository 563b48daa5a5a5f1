"""`memplug tune`, in a process of its own if the virtual device is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from memplug.cli import app
from memplug.config import read_ds_config
from tests.support.commands import run_command
from tests.support.folders import ROOT

MODELS = ROOT / "configs" / "models"


def arguments(folder: Path, ds_config: dict[str, Any], **options: Any) -> list[str]:
    """Return the arguments of the command, for a tiny model on two GPUs unless the options say otherwise."""
    (folder / "ds.json").write_text(json.dumps(ds_config))
    given = {"model": MODELS / "tiny.yaml", "gpu": "h100", "gpus": 2, "host-gib": 100, "seq-len": 256, **options}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return ["tune", str(folder / "ds.json"), *words, "-o", str(folder / "tuned.json")]


@pytest.mark.long
def test_tune_writes_the_best_configuration_and_shows_the_ten_best(tmp_path: Path) -> None:
    ds_config = {"train_batch_size": 32, "zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}
    facts_file = tmp_path / "facts.json"
    words = [*arguments(tmp_path, ds_config), "--json", str(facts_file)]
    command = [sys.executable, "-c", "from memplug.cli import main; main()", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    made, facts = json.loads((tmp_path / "tuned.json").read_text()), json.loads(facts_file.read_text())
    assert made["train_batch_size"] == 32 and made["gradient_clipping"] == 1.0
    assert made["zero_optimization"]["stage"] == 2 and read_ds_config(made).enabled
    best = facts["best"]
    assert len(best) == 10 and best[0]["tokens"] == 32 * 256
    assert [each["tokens_per_s"] for each in best] == sorted((each["tokens_per_s"] for each in best), reverse=True)
    assert {each["layout"]["stage"] for each in best} == {2}
    assert all(each["device_bytes"] <= facts["limits"]["device_bytes"] for each in best)
    layout = best[0]["layout"]
    assert layout["micro_batch"] == made["train_micro_batch_size_per_gpu"]
    assert layout["micro_batch"] * layout["accumulation"] * 2 == 32
    table = done.stdout.splitlines()[:11]
    assert "tokens/s" in table[0] and f"{best[9]['tokens_per_s']:,.0f}" in table[10]
    assert sum(facts["ruled_out"].values()) > 0 and "fixed by the DeepSpeed JSON" in done.stdout


def test_tune_reports_the_layout_of_least_memory_if_nothing_fits(tmp_path: Path) -> None:
    ds_config = {"memplug": {"enabled": True, "device_budget_gib": 0.001}}
    done = run_command(tmp_path, arguments(tmp_path, ds_config))
    assert done.exit_code == 1 and not (tmp_path / "tuned.json").exists()
    assert "no configuration fits 0.0 GiB of a GPU and 100 GiB of the host: the least is" in done.stderr
    assert "ZeRO" in done.stderr and "n_checkpoint" in done.stderr and "What to do:" in done.stderr


@pytest.mark.parametrize(
    ("options", "ds_config", "said"),
    [
        ({"gpu": "h1000"}, {}, "no GPU 'h1000'"),
        ({"gpus": 3}, {"train_batch_size": 32}, "32 is not divisible by 3 GPUs"),
        ({"model": MODELS / "none.yaml"}, {}, "No such file"),
        ({"model": ROOT / "configs" / "ds_tiny.json"}, {}, "LlamaConfig has no field gradient_accumulation_steps"),
        ({}, {"memplug": {"enabled": 3}}, "memplug.enabled"),
        ({}, {"zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}}, "contradict each other"),
    ],
)
def test_tune_refuses_invalid_inputs_with_advice(
    tmp_path: Path, options: dict[str, Any], ds_config: dict[str, Any], said: str
) -> None:
    result = CliRunner().invoke(app, arguments(tmp_path, ds_config, **options))
    assert result.exit_code == 1 and said in result.stderr and "What to do:" in result.stderr
    assert not (tmp_path / "tuned.json").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hidden_size: 96\nheads: 3", "LlamaConfig has no field heads"),
        ("num_local_experts: 8\nmlp: 3", "MixtralConfig has no field mlp"),
        ("hidden_size: 96", "vocab_size is None"),
        ("[1, 2]", "does not describe a model"),
        (
            "{vocab_size: 8, hidden_size: 96, intermediate_size: 8, num_hidden_layers: 2, num_attention_heads: 5}",
            "5 heads in 5 groups do not divide a hidden size of 96",
        ),
    ],
)
def test_invalid_shape_is_refused_with_the_reason(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "model.yaml").write_text(text)
    result = CliRunner().invoke(app, arguments(tmp_path, {}, model=tmp_path / "model.yaml"))
    assert result.exit_code == 1 and said in result.stderr and "What to do:" in result.stderr
