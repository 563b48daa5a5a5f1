"""What the recipes find wrong before they build a model, and how much memory they say that it will need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from tests.support.folders import ROOT
from tests.support.forking import launch_forked
from tests.support.recipes import checks, layout, memory, settings

SHAPES = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / "configs/models").glob("*.yaml")}


def problems(recipe: Any, ranks: int, *argv: str | Path) -> str:
    """All problems, a line each."""
    args = recipe.parse_args([*map(str, argv), "--check"])
    return "\n".join(recipe.read(args, checks.Ranks(count=ranks)).problems)


def config_with(path: Path, **fields: Any) -> Path:
    path.write_text(json.dumps({**json.loads((ROOT / "configs/ds_tiny.json").read_text()), **fields}))
    return path


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_counted_by_shape_are_those_of_the_model(name: str) -> None:
    shape = SHAPES[name]
    mixture = "num_local_experts" in shape
    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(**shape)) if mixture else LlamaForCausalLM(LlamaConfig(**shape))
    counted = memory.count(shape)
    assert counted.total == sum(parameter.numel() for parameter in model.parameters())
    own = [sum(one.numel() for one in module.parameters(recurse=False)) for module in model.modules()]
    assert counted.largest == max(own), "as DeepSpeed's estimator defines the largest layer"


def test_a_tied_head_counts_once() -> None:
    shape = {**SHAPES["tiny"], "tie_word_embeddings": True, "head_dim": 48}
    model = LlamaForCausalLM(LlamaConfig(**shape))
    assert memory.count(shape).total == sum(parameter.numel() for parameter in model.parameters())


def test_everything_that_is_wrong_with_a_deepspeed_run_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "shape.yaml").write_text("vocab_size: 320\nhidden_size: 100\n")
    found = problems(
        *(settings, 2, "--model", tmp_path / "shape.yaml", "--deepspeed_config", tmp_path / "none.json"),
        *("--save-every", "3", "--steps", "0", "--loss-log", tmp_path / "nowhere" / "log", "--tiled-loss", "0"),
    )
    for part in ("intermediate_size", "none.json", "need --save-dir", "--steps", "--loss-log", "--tiled-loss"):
        assert part in found
    assert len(found.splitlines()) == 6


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
def test_an_argument_that_would_fail_later_is_refused(argv: list[str], complaint: str) -> None:
    assert complaint in problems(settings, 8, *argv)


def test_text_for_one_micro_batch_of_all_ranks_twice_over_is_enough_and_a_token_less_is_not(tmp_path: Path) -> None:
    needed = 2 * 2 * 4 * 64  # to train and to validate, 2 ranks, 4 sequences of 64
    for missing, complaint in ((0, ""), (1, "--data")):
        (tmp_path / "text").write_bytes(b"a" * (needed - 1 - missing))  # one more ends the text
        found = problems(settings, 2, "--data", tmp_path / "text", "--seq-len", "64")
        assert complaint in found and bool(found) == bool(complaint)
        args = settings.parse_args(["--data", str(tmp_path / "text"), "--seq-len", "64", "--check"])
        tokens = settings.read(args, checks.Ranks(count=2)).tokens
        where = {"seq_len": 64, "micro_batch": 4, "rank": 1, "world_size": 2, "seed": 0}
        if not missing:
            assert [len(batches) for batches in checks.make_batches(tokens, **where)] == [1, 1]


def test_a_vocabulary_that_is_too_small_for_the_tokenizer_is_refused(tmp_path: Path) -> None:
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
def test_a_configuration_that_deepspeed_or_memplug_would_refuse_is_found(
    fields: dict[str, Any], ranks: int, complaint: str, tmp_path: Path
) -> None:
    found = problems(settings, ranks, "--deepspeed_config", config_with(tmp_path / "ds.json", **fields))
    assert complaint in found and bool(found) == bool(complaint)


def test_checkpoints_that_are_there_need_resume_and_the_ranks_that_saved_them(tmp_path: Path) -> None:
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
        (2, ["--memplug-config", "nowhere.json"], "nowhere.json"),
        (2, ["--data", "nowhere.txt"], "nowhere.txt"),
        (4, ["--tensor", "2", "--sequence", "--pipeline", "2", "--chunks", "2"], ""),
    ],
)
def test_a_layout_that_megatron_would_refuse_is_found(ranks: int, argv: list[Any], complaint: str) -> None:
    found = problems(layout, ranks, *argv)
    assert complaint in found and bool(found) == bool(complaint)


def deepspeed_states(name: str, ranks: int, **zero: Any) -> memory.Estimate:
    return memory.deepspeed_estimate(SHAPES[name], {"zero_optimization": zero}, ranks, 1, logits=0)


def test_memory_under_zero_is_that_of_deepspeeds_own_estimators() -> None:
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as stage_3
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as stage_2

    total, cpu = 6_738_415_616, {"device": "cpu"}
    assert deepspeed_states("7b", 8, stage=0).states_bytes == 20 * total
    assert deepspeed_states("7b", 8, stage=1).states_bytes == 6 * total
    assert deepspeed_states("7b", 8, stage=2).states_bytes == stage_2(total, 8, 1, False)[1]
    offloaded = deepspeed_states("7b", 8, stage=2, offload_optimizer=cpu)
    assert (offloaded.host_bytes, offloaded.states_bytes) == stage_2(total, 8, 1, True)
    largest = 32000 * 4096
    assert deepspeed_states("7b", 8, stage=3).states_bytes == stage_3(total, largest, 8, 1, False, False)[1]
    offloaded = deepspeed_states("7b", 8, stage=3, offload_optimizer=cpu, offload_param=cpu)
    assert (offloaded.host_bytes, offloaded.states_bytes) == stage_3(total, largest, 8, 1, True, True)[:2]


def megatron_states(name: str, ranks: int, *argv: str) -> float:
    args = layout.parse_args(["--bf16", "--check", *argv])
    return layout.estimate(args, SHAPES[name], ranks).states_bytes


def test_memory_under_megatron_is_eighteen_bytes_a_parameter_or_six_and_a_share_of_twelve() -> None:
    total = 6_738_415_616
    assert megatron_states("7b", 8) == 18 * total
    assert megatron_states("7b", 8, "--distributed-optimizer") == 7.5 * total
    split = ["--tensor", "2", "--distributed-optimizer"]
    norms = 65 * 4096
    assert megatron_states("7b", 8, *split) == 9 * ((total - norms) / 2 + norms)
    experts = 32 * 8 * 3 * 4096 * 14336
    rest = memory.count(SHAPES["mixtral_8x7b"]).total - experts
    spread = ["--expert", "8", "--distributed-optimizer"]
    assert megatron_states("mixtral_8x7b", 16, *spread) == round(experts / 8 * (6 + 12 / 2) + rest * (6 + 12 / 16))


COUNT = """
import sys, torch
sys.path[:0] = [{folder!r}]
import cpu
cpu.pretend()
import model, yaml
from torch.testing._internal.distributed.fake_pg import FakeStore
new_group = torch.distributed.new_group
torch.distributed.new_group = lambda *args, backend=None, **fields: new_group(*args, **fields)  # no gloo among them
for ranks, rank, fields in {cases!r}:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    parallel = model.Parallel(**fields)
    shape = yaml.safe_load(open({shapes!r} + ("mixtral_tiny" if parallel.expert > 1 else "tiny") + ".yaml"))
    model.initialize(parallel, 0)
    config = model.transformer_config(shape, parallel, torch.float32)
    chunks = model.build_chunks(config, shape, 64, False)
    weights = [weight for chunk in chunks for weight in chunk.parameters()]
    experts = sum(weight.numel() for weight in weights if not getattr(weight, "allreduce", True))
    print("counted", experts, sum(weight.numel() for weight in weights) - experts)
    model.parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
"""
LAYOUTS = [
    (1, 0, {}),
    (4, 0, {"tensor": 2, "pipeline": 2, "sequence": True}),
    (4, 3, {"tensor": 2, "pipeline": 2, "sequence": True}),
    (4, 0, {"pipeline": 2, "chunks": 2}),
    (8, 7, {"pipeline": 4}),
    (8, 0, {"tensor": 2, "sequence": True, "expert": 4, "pipeline": 2}),
    (8, 7, {"tensor": 2, "sequence": True, "expert": 4, "pipeline": 2}),
]


def test_parameters_of_a_rank_are_those_that_megatron_builds() -> None:
    pytest.importorskip("megatron.core")
    names = {"folder": str(ROOT / "examples/megatron_llama2"), "shapes": str(ROOT / "configs/models") + "/"}
    script = COUNT.format(cases=LAYOUTS, **names)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    built = [tuple(map(int, line.split()[1:])) for line in done.stdout.splitlines() if line.startswith("counted")]
    assert len(built) == len(LAYOUTS)
    for (ranks, rank, fields), found in zip(LAYOUTS, built, strict=True):
        argv = [word for name, value in fields.items() for word in (f"--{name}", str(value)) if word != "True"]
        args = layout.parse_args([*argv, "--check", str(ranks)])
        shape = SHAPES["mixtral_tiny" if "expert" in fields else "tiny"]
        stage = rank // (ranks // args.pipeline)
        assert layout.parameters_of_rank(args, shape, stage) == found, fields


@pytest.mark.distributed
@pytest.mark.long  # test_readmes.py has the same verdicts in one process
@pytest.mark.parametrize(("ranks", "status", "said"), [(1, 1, "too few"), (8, 0, "the run can start")])
def test_a_check_ends_with_status_one_where_the_run_would_not_fit_and_zero_where_it_would(
    ranks: int, status: int, said: str
) -> None:
    script, configs = ROOT / "examples/llama2/train.py", ROOT / "configs"
    big = ["--model", configs / "models/7b.yaml", "--deepspeed_config", configs / "ds_zero3.json"]
    output = launch_forked([script, *big, "--check", ranks, "--gpu-gib", "80"], processes=1, status=status)
    assert said in output and f"{ranks} rank" in output and "DeepSpeed's estimator" in output


@pytest.mark.distributed
@pytest.mark.long  # the tests above find the same problems in one process
@pytest.mark.parametrize("recipe", ["llama2", "megatron_llama2"])
def test_a_run_that_cannot_start_says_all_that_is_wrong_once_before_the_model_is_built(
    recipe: str, tmp_path: Path
) -> None:
    libraries = "deepspeed"
    if recipe == "megatron_llama2":
        pytest.importorskip("megatron.core")
        libraries = "megatron"
    huge = ["--model", ROOT / "configs/models/70b.yaml"]  # would take minutes and more memory than there is
    wrong = ["--seq-len", "400000", "--data", tmp_path / "nowhere.txt"]
    output = launch_forked([ROOT / "examples" / recipe / "train.py", *huge, *wrong], libraries=libraries, status=1)
    assert output.count("the run cannot start like this") == 1
    assert output.count("there is no ") == 1 and 'Traceback (most recent call last):\n  File "/' not in output
