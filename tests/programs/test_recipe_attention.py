"""Both recipes train as without memplug: with each attention, ranks that share sequences, FP8, and a Qwen3.

Stand-ins (tests/support/stand_ins) replace Transformer Engine and flash-attn, except in the tests for a GPU.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.support.attention_kernels import DETERMINISTIC
from tests.support.folders import ROOT
from tests.support.forking import launch_forked
from tests.support.launching import launch
from tests.support.recipes import context
from tests.support.simulated import cuda_is_simulated

pytestmark = pytest.mark.distributed

LLAMA = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
SHAPES = {
    "llama": LLAMA,
    "mixtral": {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 32, "rope_theta": 1e6},
}
PARAMETERS = {"llama": 102_720, "qwen3": 127_424, "mixtral": 213_824}
MEMPLUG = {"enabled": True, "plan_dir": False, "tokenwise": {"alpha": 1.0, "min_offload_bytes": 1}}
STEPS, TOKENS = 3, 32
MEGATRON = pytest.mark.skipif(not importlib.util.find_spec("megatron"), reason="Megatron-Core is not installed")


def ds_config(bf16: bool = False, stage: int = 1) -> dict[str, Any]:
    """Return a configuration with SGD: unlike Adam's, its steps are as long as the gradients."""
    return {
        "train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.2}},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 50_000, "allgather_bucket_size": 50_000},
        "memplug": MEMPLUG,
    }


def run(
    folder: Path,
    recipe: str,
    model: str,
    *options: str,
    memplug: bool = False,
    processes: int = 1,
    installed: bool = False,
    **config: Any,
) -> list[dict[str, Any]]:
    """Run a recipe, and return the lines of its log, one per step, with the report as the last one.

    Args:
        folder: gets the configurations and the log.
        recipe: the folder of the recipe.
        model: a name of `SHAPES`.
        *options: further arguments of the recipe.
        memplug: train with memplug.
        processes: how many ranks.
        installed: run on a GPU with the packages that are installed.
        **config: as for `ds_config`.
    """
    for name, shape in SHAPES.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(shape))
    (folder / "ds.json").write_text(json.dumps(ds_config(**config)))
    log = folder / "log.jsonl"
    log.unlink(missing_ok=True)
    common = ["--model", folder / f"{model}.yaml", "--seq-len", TOKENS, "--loss-log", log, "--eval-batches", 1]
    common += [] if "--steps" in options else ["--steps", STEPS]
    if recipe == "llama2":
        libraries = "deepspeed"
        common += ["--deepspeed_config", folder / "ds.json", "--memplug", "install" if memplug else "none"]
    else:
        libraries = "transformer_engine"
        common += ["--memplug-config", folder / "ds.json", "--memplug" if memplug else "--no-memplug"]
        common += ["--micro-batch", 2, "--micro-batches", 2]
    script = ROOT / "examples" / recipe / "train.py"
    words = [script, *map(str, common), *options]
    if installed:
        launch(words, processes=processes, env={**DETERMINISTIC, "CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    else:
        launch_forked(["tests.support.stand_in_recipe", *words], libraries=libraries, module=True, processes=processes)
    return [json.loads(line) for line in log.read_text().splitlines()]


TE, SHARING = ["--attention", "te"], ["--context", "2"]
CASES: dict[str, tuple[str, str, list[str], int]] = {
    "flash": ("llama2", "llama", ["--attention", "flash"], 1),
    "context": ("llama2", "llama", SHARING, 2),
    "Qwen3": ("llama2", "qwen3", [], 1),
    "Megatron-Core, flash": ("megatron_llama2", "llama", ["--attention", "flash", "--bf16"], 1),
    "Megatron-Core, te": ("megatron_llama2", "qwen3", TE, 1),
    "Megatron-Core, fp8": ("megatron_llama2", "llama", [*TE, "--fp8"], 1),
    "Megatron-Core, context": ("megatron_llama2", "llama", [*TE, *SHARING], 2),
    "Megatron-Core, Qwen3": ("megatron_llama2", "qwen3", [], 1),
    # the cases below run only in long tests
    "flash, context": ("llama2", "llama", ["--attention", "flash", *SHARING], 2),
    "mixture, context": ("llama2", "mixtral", SHARING, 2),
    "Qwen3, ZeRO 3": ("llama2", "qwen3", ["--zero-stage", "3"], 2),
    "context, ZeRO 3": ("llama2", "llama", [*SHARING, "--zero-stage", "3"], 2),
    "Qwen3, context, tiles": ("llama2", "qwen3", [*SHARING, "--tiled-loss", "3"], 2),
    "Megatron-Core, Qwen3, tensor": ("megatron_llama2", "qwen3", ["--tensor", "2", "--sequence"], 2),
    "Megatron-Core, mixture": ("megatron_llama2", "mixtral", [*TE, *SHARING, "--expert", "2"], 2),
    "Megatron-Core, all": ("megatron_llama2", "qwen3", [*TE, "--fp8", "--tensor", "2", "--sequence"], 2),
}
LONG = list(CASES)[list(CASES).index("flash, context") :]


@MEGATRON
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.long) if case in LONG else case for case in CASES]
)
def test_losses_equal_those_without_memplug_to_the_bit(case: str, tmp_path: Path) -> None:
    recipe, model, options, processes = CASES[case]
    compare(tmp_path, recipe, model, *options, processes=processes, bf16="flash" in options)


@pytest.mark.gpu
@MEGATRON
@pytest.mark.skipif(cuda_is_simulated(), reason="kernels of other packages are not simulated")
@pytest.mark.parametrize("case", ["flash", *(f"Megatron-Core, {kind}" for kind in ("flash", "te", "fp8"))])
def test_losses_equal_those_without_memplug_with_the_real_packages(case: str, tmp_path: Path) -> None:
    for name in ("flash_attn", "transformer_engine"):
        pytest.importorskip(name)
    recipe, model, options, _ = CASES[case]
    sixteen = ["--bf16"] if recipe == "megatron_llama2" and "--bf16" not in options else []
    compare(tmp_path, recipe, model, *options, *sixteen, installed=True, bf16=True)


def compare(folder: Path, recipe: str, model: str, *options: str, **where: Any) -> None:
    """Compare a run with memplug with one without."""
    *plain, without = run(folder, recipe, model, *options, **where)
    *ours, report = run(folder, recipe, model, *options, memplug=True, **where)
    assert ours == plain and len(plain) == STEPS
    assert plain[-1]["loss"] < plain[0]["loss"]
    without, report = without["report"], report["report"]
    assert report["validation_loss"] == without["validation_loss"] and without["memplug"] is None
    assert report["memplug"]["offloaded_bytes"] > 0 == report["memplug"]["opaque_regions"]
    assert report["parameters"] == PARAMETERS[model], "as many as Hugging Face's model has"


def assert_same_training(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """Assert equality to rounding; both runs read the same sequences."""
    for name in ("loss", *(["gradient_norm"] if "gradient_norm" in ours[0] else [])):
        assert [line[name] for line in ours[:-1]] == pytest.approx([line[name] for line in theirs[:-1]], rel=1e-3)
    ours, theirs = ours[-1]["report"], theirs[-1]["report"]
    assert ours["validation_loss"] == pytest.approx(theirs["validation_loss"], rel=1e-3)
    tokens = [report["tokens_per_s"] * report["step_s"] for report in (ours, theirs)]
    assert tokens == pytest.approx([4 * TOKENS] * 2), "each token counts once, however many ranks share it"
    flops = [
        report["mfu"] * report["peak_flop_per_s"] * report["ranks"] * report["step_s"] for report in (ours, theirs)
    ]
    assert flops[0] == pytest.approx(flops[1])


@pytest.mark.parametrize("stage", [1, *(pytest.param(stage, marks=pytest.mark.long) for stage in (0, 2, 3))])
def test_two_deepspeed_ranks_that_share_sequences_train_as_one_rank(stage: int, tmp_path: Path) -> None:
    alone = run(tmp_path, "llama2", "llama", stage=stage)
    assert_same_training(run(tmp_path, "llama2", "llama", *SHARING, processes=2, stage=stage), alone)


@pytest.mark.long
def test_four_ranks_sharing_sequences_in_pairs_train_as_two_ranks(tmp_path: Path) -> None:
    alone = run(tmp_path, "llama2", "mixtral", processes=2)
    together = run(tmp_path, "llama2", "mixtral", *SHARING, processes=4)
    # the loss that balances experts counts only the rank's own tokens
    assert [line["loss"] for line in together[:-1]] == pytest.approx([line["loss"] for line in alone[:-1]], rel=5e-3)


@MEGATRON
def test_two_megatron_ranks_that_share_sequences_train_as_one_rank(tmp_path: Path) -> None:
    alone = run(tmp_path, "megatron_llama2", "llama", *TE)
    assert_same_training(run(tmp_path, "megatron_llama2", "llama", *TE, *SHARING, processes=2), alone)


@pytest.mark.long
def test_ranks_that_share_sequences_resume_where_they_stopped(tmp_path: Path) -> None:
    saves = ["--save-dir", str(tmp_path / "saves")]
    whole = run(tmp_path, "llama2", "llama", *SHARING, "--steps", "4", processes=2, memplug=True)
    run(tmp_path, "llama2", "llama", *SHARING, *saves, "--steps", "2", processes=2, memplug=True)
    rest = run(tmp_path, "llama2", "llama", *SHARING, *saves, "--resume", "--steps", "4", processes=2, memplug=True)
    assert rest[:-1] == whole[2:-1] and len(rest) == 3
    assert rest[-1]["report"]["validation_loss"] == whole[-1]["report"]["validation_loss"]


def test_rank_gets_the_same_sequence_part_as_from_deepspeeds_adapter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from deepspeed.runtime.sequence_parallel import ulysses_sp

    class Same:
        """A group all of whose ranks read the same sequences."""

        def all_gather(self, found: list[torch.Tensor], own: torch.Tensor, group: Any) -> None:
            for one in found:
                one.copy_(own)

    monkeypatch.setattr(ulysses_sp, "dist", Same())
    tokens = torch.randint(0, 300, (2, 12))
    sample = {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(12).repeat(2, 1)}
    shares = []
    for rank in range(3):
        adapter = ulysses_sp.UlyssesSPDataLoaderAdapter([dict(sample)], rank, None, 3, "cpu")
        dealt, (part, share) = next(adapter), context.part_of(tokens, rank, 3)
        assert all(torch.equal(part[name], value) for name, value in dealt.items())
        shares.append(share)
    assert sum(shares) == pytest.approx(1) and shares == pytest.approx([4 / 11, 4 / 11, 3 / 11])
