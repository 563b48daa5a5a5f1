"""The problems that the recipes find before they build a model."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.folders import ROOT
from tests.support.forking import launch_forked
from tests.support.recipes import checks, layout, settings

SHAPES = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / "configs/models").glob("*.yaml")}


def problems(recipe: Any, ranks: int, *argv: str | Path) -> str:
    """Return all problems, one per line."""
    args = recipe.parse_args([*map(str, argv), "--check"])
    return "\n".join(recipe.read(args, checks.Ranks(count=ranks)).problems)


def config_with(path: Path, **fields: Any) -> Path:
    path.write_text(json.dumps({**json.loads((ROOT / "configs/ds_tiny.json").read_text()), **fields}))
    return path


def test_every_problem_of_a_deepspeed_run_is_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "shape.yaml").write_text("vocab_size: 320\nhidden_size: 100\n")
    found = problems(
        *(settings, 2, "--model", tmp_path / "shape.yaml", "--deepspeed_config", tmp_path / "none.json"),
        *("--save-every", "3", "--steps", "0", "--loss-log", tmp_path / "nowhere" / "log", "--tiled-loss", "0"),
    )
    for part in ("intermediate_size", "none.json", "need --save-dir", "--steps", "--loss-log", "--tiled-loss"):
        assert part in found
    assert len(found.splitlines()) == 6


@pytest.mark.parametrize("recipe", [settings, layout])
@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"model_type": "gemma2"}, "of a gemma2: this recipe trains a llama, a mixtral or a qwen3"),
        ({"model_type": "mixtral"}, "of a mixtral, but num_local_experts is no number"),
        ({"model_type": "llama", "num_local_experts": 8}, "of a llama, but num_local_experts is 8"),
        ({"model_type": "qwen3"}, "not the shape of a Llama, a Mixtral or a Qwen3: no number for head_dim"),
        ({"hidden_size": 130}, "num_attention_heads (4) has to divide hidden_size (130)"),
        ({"model_type": "qwen3", "head_dim": 32, "hidden_size": 130}, ""),
    ],
)
def test_shape_that_fits_no_recipe_model_is_refused(
    recipe: Any, fields: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    (tmp_path / "shape.yaml").write_text(yaml.safe_dump({**SHAPES["tiny"], **fields}))
    found = problems(recipe, 1, "--model", tmp_path / "shape.yaml")
    assert complaint in found and bool(found) == bool(complaint)


@pytest.mark.parametrize(
    ("ranks", "argv", "complaint"),
    [
        (3, ["--context", "2"], "--context (2) has to divide the number of ranks (3)"),
        (3, ["--context", "3", "--seq-len", "255"], "num_attention_heads"),
        (2, ["--context", "2", "--seq-len", "255"], "--seq-len"),
        (2, ["--context", "2", "--seq-len", "2"], "--seq-len has to be at least twice --context"),
        (2, ["--context", "0"], "--context is 0: at least 1"),
        (4, ["--context", "4"], ""),  # more than the two key heads, which are then repeated
        (4, ["--context", "2"], ""),
    ],
)
def test_ranks_that_cannot_share_sequences_by_ulysses_are_refused(ranks: int, argv: list[str], complaint: str) -> None:
    found = problems(settings, ranks, *argv)
    assert complaint in found and bool(found) == bool(complaint)


def test_heads_that_ulysses_cannot_distribute_are_refused(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 96}
    (tmp_path / "shape.yaml").write_text(yaml.safe_dump({**SHAPES["tiny"], **heads}))
    where = ["--model", tmp_path / "shape.yaml", "--seq-len", "96", "--context"]
    assert "num_key_value_heads (4), or be a multiple" in problems(settings, 6, *where, "6")
    assert problems(settings, 12, *where, "12") == problems(settings, 2, *where, "2") == ""


def test_batch_size_counts_only_ranks_that_read_different_sequences(tmp_path: Path) -> None:
    fields = {"train_batch_size": 16, "gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": None}
    config = config_with(tmp_path / "ds.json", **fields)
    args = settings.parse_args(["--deepspeed_config", str(config), "--context", "2", "--check"])
    found = settings.read(args, checks.Ranks(count=4)).config
    sizes = {name: found.get(name) for name in fields}
    assert sizes == {**fields, "train_batch_size": None, "train_micro_batch_size_per_gpu": 4}


@pytest.mark.parametrize(
    ("recipe", "argv", "complaint"),
    [
        (settings, ["--attention", "flash"], "flash needs flash_attn, which cannot be imported"),
        (settings, ["--attention", "flash"], 'float32: set "bf16" in DeepSpeed\'s JSON'),
        (layout, ["--attention", "flash", "--bf16"], "flash needs flash_attn, which cannot be imported"),
        (layout, ["--attention", "flash", "--no-bf16"], "float32: add --bf16"),
        (layout, ["--attention", "te"], "te needs transformer_engine.pytorch, which cannot be imported"),
    ],
)
def test_attention_unsupported_by_machine_or_dtype_is_refused(
    recipe: Any, argv: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in checks.ATTENTION_PACKAGES.values():
        monkeypatch.setitem(sys.modules, package, None)  # as if the package were not installed
    assert complaint in problems(recipe, 1, *argv)


@pytest.mark.parametrize("gpu", [False, True])
def test_flash_attention_without_gpu_is_refused_unless_run_is_elsewhere(
    gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setattr(checks, "has_gpu", lambda: gpu)
    argv = ["--attention", "flash", "--bf16"]
    assert ("needs a GPU, and there is none here" in problems(layout, 1, *argv)) == (not gpu)
    elsewhere = layout.parse_args([*argv, "--check", "1"])
    assert layout.read(elsewhere, checks.Ranks(count=1)).problems == []


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--data", "nowhere.txt"], "there is no nowhere.txt"),
        (["--tokenizer", "nowhere"], "nowhere is no folder"),
        (["--weights", "nowhere"], "cannot read the model's shape from nowhere"),
        (["--seq-len", "3000000"], "the default text has"),
        (["--alpha", "blue"], "alpha"),
        (["--alpha", "2"], "alpha"),
    ],
)
def test_argument_that_would_fail_later_is_refused(argv: list[str], complaint: str) -> None:
    assert complaint in problems(settings, 8, *argv)


def test_text_must_hold_one_training_and_validation_batch_of_all_ranks(tmp_path: Path) -> None:
    needed = 2 * 2 * 4 * 64  # to train and to validate, 2 ranks, 4 sequences of 64
    for missing, complaint in ((0, ""), (1, "--data")):
        (tmp_path / "text").write_bytes(b"a" * (needed - 1 - missing))  # an end-of-text token follows the text
        found = problems(settings, 2, "--data", tmp_path / "text", "--seq-len", "64")
        assert complaint in found and bool(found) == bool(complaint)
        args = settings.parse_args(["--data", str(tmp_path / "text"), "--seq-len", "64", "--check"])
        tokens = settings.read(args, checks.Ranks(count=2)).tokens
        where = {"seq_len": 64, "micro_batch": 4, "rank": 1, "world_size": 2, "seed": 0}
        if not missing:
            assert [len(batches) for batches in checks.make_batches(tokens, **where)] == [1, 1]


def test_vocabulary_too_small_for_the_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shape.yaml").write_text(yaml.safe_dump({**SHAPES["tiny"], "vocab_size": 256}))
    for recipe in (settings, layout):
        assert "bytes need 257" in problems(recipe, 1, "--model", tmp_path / "shape.yaml")


@pytest.mark.parametrize(
    ("fields", "ranks", "complaint"),
    [
        ({"train_batch_size": 9, "gradient_accumulation_steps": 2}, 2, "train_batch_size is 9"),
        ({"train_micro_batch_size_per_gpu": None}, 2, "neither"),
        ({"train_micro_batch_size_per_gpu": "auto"}, 2, "at least 1"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, 2, "offload_param needs ZeRO 3"),
        ({"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}, 2, "offload_optimizer needs"),
        ({"memplug": {"enabled": True, "aplha": 1}}, 2, "aplha"),
        ({"train_batch_size": 16, "gradient_accumulation_steps": None}, 2, ""),
    ],
)
def test_configuration_refused_by_deepspeed_or_memplug_is_reported(
    fields: dict[str, Any], ranks: int, complaint: str, tmp_path: Path
) -> None:
    found = problems(settings, ranks, "--deepspeed_config", config_with(tmp_path / "ds.json", **fields))
    assert complaint in found and bool(found) == bool(complaint)


def test_existing_checkpoints_need_resume_and_the_same_number_of_ranks(tmp_path: Path) -> None:
    (tmp_path / "step-00000003").mkdir()
    for rank in range(2):
        (tmp_path / "step-00000003" / f"random_state_rank{rank:05d}.pt").touch()
    (tmp_path / "latest").write_text("step-00000003")
    assert "add --resume" in problems(settings, 2, "--save-dir", tmp_path)
    assert problems(settings, 2, "--save-dir", tmp_path, "--resume") == ""
    for ranks in (1, 4):
        assert "was saved by 2 ranks" in problems(settings, ranks, "--save-dir", tmp_path, "--resume")
    assert problems(settings, 1, "--save-dir", tmp_path, "--resume", "--zero-stage", "0") == ""


@pytest.mark.parametrize(
    ("ranks", "argv", "complaint"),
    [
        (4, ["--tensor", "3"], "number of ranks"),
        (3, ["--tensor", "3"], "num_attention_heads"),
        (4, ["--tensor", "4"], "num_key_value_heads"),
        (3, ["--pipeline", "3"], "number of layers"),
        (2, ["--pipeline", "2", "--chunks", "4"], "number of layers"),
        (2, ["--pipeline", "2", "--chunks", "2", "--micro-batches", "3"], "--micro-batches"),
        (1, ["--chunks", "2"], "--chunks needs"),
        (2, ["--tensor", "2", "--sequence", "--seq-len", "63"], "--seq-len"),
        (2, ["--expert", "2"], "no experts"),
        (3, ["--expert", "3", "--model", ROOT / "configs/models/mixtral_tiny.yaml"], "number of experts"),
        (6, ["--expert", "4", "--model", ROOT / "configs/models/mixtral_tiny.yaml"], "number of ranks"),
        (2, ["--tensor", "2", "--model", ROOT / "configs/models/mixtral_tiny.yaml"], "needs --sequence"),
        (2, ["--context", "2"], "--context of 2 or more needs --attention te"),
        (1, ["--fp8"], "--fp8 needs --attention te"),
        (2, ["--loss-log", "nowhere/log"], "--loss-log nowhere/log: there is no folder nowhere"),
        (2, ["--memplug-config", "nowhere.json"], "nowhere.json"),
        (2, ["--data", "nowhere.txt"], "nowhere.txt"),
        (4, ["--tensor", "2", "--sequence", "--pipeline", "2", "--chunks", "2"], ""),
    ],
)
def test_layout_refused_by_megatron_is_reported(ranks: int, argv: list[Any], complaint: str) -> None:
    found = problems(layout, ranks, *argv)
    assert complaint in found and bool(found) == bool(complaint)


@pytest.mark.parametrize(
    ("ranks", "argv", "complaint"),
    [
        (4, ["--context", "2", "--tensor", "2", "--pipeline", "2"], "--tensor × --pipeline × --context (8)"),
        (2, ["--context", "2", "--seq-len", "254"], "2 × --context (4) has to divide --seq-len (254)"),
        (8, ["--context", "4", "--tensor", "2", "--sequence", "--seq-len", "8"], ""),
        (8, ["--context", "4", "--tensor", "2", "--sequence", "--seq-len", "12"], "--seq-len / --context (3)"),
        (1, ["--fp8", "--seq-len", "63", "--micro-batch", "2"], "8 (8) has to divide a rank's tokens (126)"),
        (1, ["--fp8", "--model", "shape.yaml"], "a rank's part of the intermediate_size (360)"),
        (4, ["--context", "2", "--fp8"], ""),
    ],
)
def test_layout_refused_by_transformer_engine_is_reported(
    ranks: int, argv: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("shape.yaml").write_text(yaml.safe_dump({**SHAPES["tiny"], "intermediate_size": 360}))
    args = layout.parse_args([*argv, "--attention", "te", "--check", str(ranks)])
    found = "\n".join(layout.read(args, checks.Ranks(count=ranks)).problems)
    assert complaint in found and bool(found) == bool(complaint)


@pytest.mark.distributed
@pytest.mark.long  # test_readmes.py tests the same verdicts in one process
@pytest.mark.parametrize(("ranks", "status", "said"), [(1, 1, "too few"), (8, 0, "the run can start")])
def test_check_exits_with_1_if_the_run_does_not_fit_else_0(ranks: int, status: int, said: str) -> None:
    script, configs = ROOT / "examples/llama2/train.py", ROOT / "configs"
    big = ["--model", configs / "models/7b.yaml", "--deepspeed_config", configs / "ds_zero3.json"]
    output = launch_forked([script, *big, "--check", ranks, "--gpu-gib", "80"], processes=1, status=status)
    assert said in output and f"{ranks} rank" in output and "DeepSpeed's estimator" in output


@pytest.mark.distributed
@pytest.mark.long  # the tests above find the same problems in one process
@pytest.mark.parametrize("recipe", ["llama2", "megatron_llama2"])
def test_run_that_cannot_start_reports_problems_once_before_building_model(recipe: str, tmp_path: Path) -> None:
    libraries = "deepspeed"
    if recipe == "megatron_llama2":
        pytest.importorskip("megatron.core")
        libraries = "megatron"
    huge = [
        "--model",
        ROOT / "configs/models/70b.yaml",
    ]  # takes minutes to build, and more memory than this machine has
    wrong = ["--seq-len", "400000", "--data", tmp_path / "nowhere.txt"]
    output = launch_forked([ROOT / "examples" / recipe / "train.py", *huge, *wrong], libraries=libraries, status=1)
    assert output.count("the run cannot start like this") == 1
    assert output.count("there is no ") == 1 and 'Traceback (most recent call last):\n  File "/' not in output
