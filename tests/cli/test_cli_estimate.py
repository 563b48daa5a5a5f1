"""`memplug estimate`, in processes of its own, since torch gets the virtual device there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from memplug.cli import app
from tests.support.commands import run_command
from tests.support.folders import ROOT

pytest.importorskip("transformers")
MODEL = ROOT / "configs" / "models" / "tiny.yaml"
MIXTURE = str(ROOT / "configs" / "models" / "mixtral_tiny.yaml")


@pytest.mark.long
def test_estimate_writes_the_same_modes_to_table_and_files(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    block = {"enabled": True, "host_budget_gib": 1, "device_budget_gib": 1}
    settings = {"train_micro_batch_size_per_gpu": 3, "fp16": {"enabled": True}, "memplug": block}
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    files = {name: tmp_path / f"{name}.file" for name in ("json", "html", "chrome")}
    options = [each for name, file in files.items() for each in (f"--{name}", file)]
    words = ["estimate", tmp_path / "ds.json", "--model", MODEL, "--gpu", "H100", *options, "--no-limits"]
    command = [sys.executable, "-c", "from memplug.cli import main; main()", *words, "--plan-dir", tmp_path / "plans"]
    told = subprocess.run(map(str, command), capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert told.returncode == 0, told.stderr
    assert "one NVIDIA H100 80GB HBM3: 4 layers of 128, 3 × 2,048 tokens, fp16, head, AdamW" in told.stdout
    facts = json.loads(files["json"].read_text())
    assert list(facts["modes"]) == ["keep", "full", "selective", "memplug"] and facts["impossible"] == {}
    for mode, each in facts["modes"].items():
        assert each["step_s"] > 0 and each["fits"] and 0 < each["model_flops_utilization"] < 1
        assert mode in told.stdout and "longest_seq_len" not in each
    assert facts["modes"]["full"]["over_keep"] > 1 == facts["modes"]["keep"]["over_keep"]
    assert "memplug" in files["html"].read_text() and json.loads(files["chrome"].read_text())["traceEvents"]
    assert len(list((tmp_path / "plans").glob("*.json"))) == 1


def test_estimate_gives_a_reason_if_the_arenas_size_is_unknown(tmp_path: Path) -> None:
    block = {"enabled": True, "arena": {"enabled": False}}
    (tmp_path / "ds.json").write_text(json.dumps({"memplug": block}))
    words = ["estimate", tmp_path / "ds.json", "--model", MODEL, "--no-limits", "--json", tmp_path / "found.json"]
    for mode in ("keep", "memplug"):
        told = run_command(tmp_path, [*words, "--mode", mode])
        assert told.exit_code == 0, told.stderr
        found = json.loads((tmp_path / "found.json").read_text())["modes"][mode]
        assert found["arena_reserved_bytes"] is None and found["arena_off_because"]
        assert f"{mode}: reserved with the arena unknown: {found['arena_off_because']}" in told.stderr


def test_tiled_loss_takes_less_memory_and_needs_hugging_face(tmp_path: Path) -> None:
    words = ["estimate", "--model", MODEL, "--mode", "keep", "--no-limits", "--json", tmp_path / "found.json"]
    peaks = []
    for tiles in (1, 8):
        told = run_command(tmp_path, [*words, "--tiled-loss", tiles])
        assert told.exit_code == 0, told.stderr
        peaks.append(json.loads((tmp_path / "found.json").read_text())["modes"]["keep"]["peak_allocated_bytes"])
    assert "head, loss in 8 tiles, AdamW" in told.stdout
    logits_bytes = 4 * 320 * 2048  # in float32; several such tensors exist at once
    assert peaks[0] - peaks[1] > logits_bytes
    told = run_command(tmp_path, [*words, "--tiled-loss", 2, "--tensor", 2])
    assert told.exit_code == 2 and "--tiled-loss" in told.stderr


@pytest.mark.long
def test_estimated_limits_of_a_mode_are_in_table_and_json(tmp_path: Path) -> None:
    told = run_command(tmp_path, ["estimate", "--model", MODEL, "--mode", "keep", "--json", tmp_path / "found.json"])
    assert told.exit_code == 0, told.stderr
    keep = json.loads((tmp_path / "found.json").read_text())["modes"]["keep"]
    assert keep["longest_seq_len"] > 2048 and keep["largest_micro_batch"] > 3
    rows = {line.rsplit(maxsplit=1)[0]: line.split()[-1] for line in told.stdout.splitlines() if line.startswith("l")}
    assert rows["longest sequence"] == f"{keep['longest_seq_len']:,}"
    assert rows["largest micro-batch"] == f"{keep['largest_micro_batch']:,}"


@pytest.mark.long
def test_deepspeed_rank_is_estimated_with_its_zero_stage(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    settings = json.loads((ROOT / "configs" / "ds_zero3.json").read_text())
    facts, words = {}, ["estimate", tmp_path / "ds.json"]
    for gpus in (2, 8):
        (tmp_path / "ds.json").write_text(json.dumps(settings))
        options = ["--gpu", "h100", "--gpus", gpus, "--seq-len", 512, "--mode", "memplug", "--json", tmp_path / "found"]
        told = run_command(tmp_path, [*words, "--model", ROOT / "configs/models/7b.yaml", "--layers", 1, *options])
        assert told.exit_code == 0, told.stderr
        assert f"one of {gpus} NVIDIA H100 80GB HBM3, ZeRO 3" in told.stdout
        facts[gpus] = json.loads((tmp_path / "found").read_text())["modes"]["memplug"]
    # each parameter takes 2 bytes, its gradient 4, and its three optimizer states 4 each
    saved_bytes = facts[2]["peak_allocated_bytes"] - facts[8]["peak_allocated_bytes"]
    assert saved_bytes == pytest.approx(465e6 * 18 * (1 / 2 - 1 / 8), rel=0.1)
    settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    told = run_command(tmp_path, [*words, "--model", MODEL, "--gpus", 2, "--mode", "keep"])
    assert told.exit_code == 1 and "offload_optimizer: cpu leaves work to the host" in told.stderr


@pytest.mark.long
def test_deepspeed_rank_is_estimated_for_qwen3_with_tiled_loss(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    (tmp_path / "qwen3.yaml").write_text(MODEL.read_text() + "model_type: qwen3\nhead_dim: 64\n")
    (tmp_path / "ds.json").write_text((ROOT / "configs" / "ds_zero3.json").read_text())
    words = ["estimate", tmp_path / "ds.json", "--gpus", 2, "--seq-len", 512, "--tiled-loss", 4, "--mode", "keep"]
    facts = {}
    for model in (tmp_path / "qwen3.yaml", MODEL):
        told = run_command(tmp_path, [*words, "--model", model, "--json", tmp_path / "found"])
        assert told.exit_code == 0, told.stderr
        assert "ZeRO 3: 4 layers of 128, 1 × 512 tokens, bf16, head, loss in 4 tiles" in told.stdout
        facts[model.stem] = json.loads((tmp_path / "found").read_text())["modes"]["keep"]
    wider = 3 * 2 * 512 * 4 * 128 * (64 - 32) * (4 + 2 + 2 + 4)  # FLOPs that twice as large heads add, in four layers
    attention = 7 * 2 * 512 * 512 * 4 * 4 * (64 - 32) / 2  # causal: two matmuls in forward, five in backward
    assert facts["qwen3"]["flops"] - facts["tiny"]["flops"] == pytest.approx(wider + attention, rel=0.01)


@pytest.mark.long
def test_megatron_rank_is_estimated_and_shown_with_its_layout(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    model = ROOT / "configs" / "models" / "mixtral_tiny.yaml"
    options = ["--expert", 2, "--seq-len", 256, "--mode", "keep", "--json", tmp_path / "found.json"]
    told = run_command(tmp_path, ["estimate", "--model", model, *options])
    assert told.exit_code == 0, told.stderr
    assert "one of 2 NVIDIA H200, Megatron-Core, expert 2, data 2: 4 layers of 128, 1 × 256 tokens" in told.stdout
    assert "longest sequence" not in told.stdout and "bubble" not in told.stdout
    facts = json.loads((tmp_path / "found.json").read_text())
    assert facts["layout"]["expert"] == facts["layout"]["data"] == 2 and facts["stages"] == {}
    assert facts["modes"]["keep"]["step_s"] > 0


@pytest.mark.long
def test_pipeline_estimate_has_bubble_and_stages(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    (tmp_path / "ds.json").write_text(json.dumps({"gradient_accumulation_steps": 3, "bf16": {"enabled": True}}))
    options = ["--pipeline", 4, "--seq-len", 256, "--mode", "keep", "--json", tmp_path / "found.json"]
    told = run_command(tmp_path, ["estimate", tmp_path / "ds.json", "--model", MODEL, *options])
    assert told.exit_code == 0, told.stderr
    assert (
        "one of 4 NVIDIA H200, Megatron-Core, pipeline 4" in told.stdout and "3 micro-batches of 1 × 256" in told.stdout
    )
    facts = json.loads((tmp_path / "found.json").read_text())
    keep, stages = facts["modes"]["keep"], [each["keep"] for each in facts["stages"].values()]
    assert list(facts["stages"]) == ["0", "1", "3"] and facts["layout"]["micro_batches"] == 3
    slowest_s = max(each["step_s"] for each in stages)
    assert keep["step_s"] == pytest.approx(slowest_s + keep["bubble_s"])
    assert min(each["step_s"] for each in stages) * 0.5 < keep["bubble_s"] < slowest_s  # about 3/3 of a step
    assert keep["peak_reserved_bytes"] == max(each["peak_reserved_bytes"] for each in stages)


@pytest.mark.long
def test_mixtral_defaults_to_megatron_and_needs_a_trace_with_deepspeed(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    model = ROOT / "configs" / "models" / "mixtral_tiny.yaml"
    told = run_command(tmp_path, ["estimate", "--model", model, "--seq-len", 256, "--mode", "full"])
    assert told.exit_code == 0 and "one NVIDIA H200, Megatron-Core: 4 layers" in told.stdout, told.stderr
    (tmp_path / "ds.json").write_text("{}")
    told = run_command(tmp_path, ["estimate", tmp_path / "ds.json", "--model", model, "--gpus", 2, "--mode", "keep"])
    assert told.exit_code == 1 and "--trace" in told.stderr and "Traceback" not in told.stderr


def test_routing_puts_a_room_for_experts_into_reserved_memory(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    (tmp_path / "ds.json").write_text((ROOT / "configs" / "ds_tiny.json").read_text())
    words = [tmp_path / "ds.json", "--model", MIXTURE, "--gpus", 2, "--layers", 2, "--seq-len", 256, "--mode", "keep"]
    told = run_command(tmp_path, ["estimate", *words, "--routing", "uniform", "--json", tmp_path / "found"])
    assert told.exit_code == 0 and "uniform routing" in told.stdout, told.stderr
    found = json.loads((tmp_path / "found").read_text())["modes"]["keep"]
    assert 0 < found["arena_room_bytes"] < found["arena_bytes"] < found["arena_reserved_bytes"]
    assert "room for experts in it" in told.stdout


@pytest.mark.long
def test_pipeline_of_expert_parallel_ranks_recomputes_drawn_routings(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    words = ["--model", MIXTURE, "--layers", 4, "--seq-len", 256, "--expert", 2, "--pipeline", 2, "--mode", "full"]
    told = run_command(tmp_path, ["estimate", *words, "--routing", "uniform", "--json", tmp_path / "found"])
    assert told.exit_code == 0, told.stderr
    facts = json.loads((tmp_path / "found").read_text())
    rooms = [stage["full"]["arena_room_bytes"] for stage in facts["stages"].values()]
    assert facts["modes"]["full"]["arena_room_bytes"] == max(rooms) and min(rooms) > 0


RECORDS = """
import sys, torch, yaml, memplug
from transformers import MixtralConfig, MixtralForCausalLM
model = MixtralForCausalLM(MixtralConfig(**yaml.safe_load(open(sys.argv[1])), use_cache=False)).train()
if sys.argv[3] == "eager":
    model.set_experts_implementation("eager")
ids = torch.randint(0, 320, (1, 256))
with memplug.record_values(model, sys.argv[2]):
    model(input_ids=ids, labels=ids).loss.backward()
"""


@pytest.mark.long
def test_hugging_face_mixtral_is_estimated_from_a_value_trace(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    model, facts = ROOT / "configs" / "models" / "mixtral_tiny.yaml", {}
    settings = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    words = ["--model", model, "--layers", 2, "--seq-len", 256, "--mode", "keep", "--json", tmp_path / "found"]
    for experts in ("eager", "grouped"):
        trace = tmp_path / f"{experts}.json"
        subprocess.run([sys.executable, "-c", RECORDS, model, trace, experts], check=True, cwd=ROOT, timeout=300)
        for options in ((), (tmp_path / "ds.json", "--gpus", 2)):
            told = run_command(tmp_path, ["estimate", *options, *words, "--trace", trace])
            assert told.exit_code == 0, told.stderr
            facts[experts, len(options)] = json.loads((tmp_path / "found").read_text())["modes"]["keep"]
    for options in (0, 3):
        assert facts["eager", options]["flops"] == facts["grouped", options]["flops"], "each token has two experts"
        assert facts["eager", options]["step_s"] > facts["grouped", options]["step_s"]
    told = run_command(tmp_path, ["estimate", *words, "--seq-len", 128, "--trace", tmp_path / "eager.json"])
    assert told.exit_code == 1 and "model.layers.0.mlp.experts sends 128 tokens" in told.stderr


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--gpu", "h201"], 1, "there are 4090, 910b, a100, h100, h200"),
        (["--gpus", "2"], 2, "DeepSpeed JSON"),
        (["--tensor", "2", "--no-head"], 2, "--no-head"),
        (["--tensor", "3"], 1, "--tensor is 3, which does not divide the model's num_attention_heads, 4"),
        (["--gpus", "2", "--pipeline", "4"], 1, "which does not divide --gpus, 2"),
        (["--sequence"], 1, "--sequence splits the sequence among tensor-parallel ranks, and --tensor is 1"),
        (["--trace", "absent.json"], 1, "absent.json: unreadable"),
        (["--trace", "absent.json", "--tensor", "2"], 2, "--trace"),
        (["--trace", "absent.json", "--no-head"], 2, "whole model"),
        (["--trace", "absent.json", "--routing", "even"], 2, "--routing"),
        (["--routing", "uniform"], 2, "works only for a mixture"),
        (["--model", MIXTURE, "--routing", "zippy"], 1, "there is no routing 'zippy'"),
        (["--tensor", "2", "--plan-dir", "plans"], 1, "no plan can be written for Megatron-Core's ranks"),
        (["--mode", "kept"], 2, "'kept' is none of"),
        (["--model", "absent.yaml"], 1, "absent.yaml"),
    ],
)
def test_estimate_refuses_unusable_options(options: list[str], code: int, said: str) -> None:
    told = CliRunner().invoke(app, ["estimate", *([] if "--model" in options else ["--model", str(MODEL)]), *options])
    assert told.exit_code == code and said in told.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", MODEL, "--attention", "math"], "cudnn, flash"),
        (["--model", MODEL, "--html", "/absent/chart.html", "--mode", "keep", "--no-limits"], "/absent/chart.html"),
    ],
)
def test_estimate_refuses_options_unusable_on_the_virtual_device(
    options: list[object], said: str, tmp_path: Path
) -> None:
    told = run_command(tmp_path, ["estimate", *options])
    assert told.exit_code == 1 and said in told.stderr and "Traceback" not in told.stderr


@pytest.mark.long
def test_model_that_cannot_fit_reports_the_least_budget(tmp_path: Path) -> None:
    small = json.loads((ROOT / "configs" / "hardware" / "4090.json").read_text())
    small["memory_bytes"]["value"] = 20e6
    (tmp_path / "small.json").write_text(json.dumps(small))
    told = run_command(tmp_path, ["estimate", "--model", MODEL, "--gpu", tmp_path / "small.json", "--no-limits"])
    assert told.exit_code == 1 and 'Set "device_budget_gib" to ' in told.stderr
    assert [line.split()[-4:] for line in told.stdout.splitlines() if line.startswith("fits")] == [["no"] * 4]
