"""The DeepSpeed recipe on two processes: Hugging Face weights and tokenizers, offloading, logits in tiles."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import memplug
from tests.support.folders import ROOT
from tests.support.forking import launch_forked
from tests.support.recipes import checks, memory, settings, text, tiled_loss

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
# DeepSpeed's defaults are for models that exceed this machine's memory
BUCKETS = {"reduce_bucket_size": 50_000, "allgather_bucket_size": 50_000}
WORDS = 40_000  # more ids than int16 has


def save_tokenizer(folder: Path, words: int = WORDS) -> Path:
    """Save a word tokenizer in Hugging Face's format."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "</s>": 1, **{f"w{number}": number for number in range(2, words)}}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>", eos_token="</s>").save_pretrained(folder)
    return folder


def save_model(folder: Path, mixture: bool = False, **sizes: int) -> Path:
    """Save a model in Hugging Face's format, with weights that no seed of the recipe makes."""
    torch.manual_seed(12345)
    fields = {**SIZES, **sizes, "initializer_range": 0.2}
    model = (
        MixtralForCausalLM(MixtralConfig(**fields, **EXPERTS)) if mixture else LlamaForCausalLM(LlamaConfig(**fields))
    )
    model.save_pretrained(folder)
    return folder


def save_text(path: Path, lines: int = 200) -> Path:
    """Save JSON lines of words whose ids are above 32,767."""
    texts = [" ".join(f"w{WORDS - 1 - (line * 7 + word) % 5000}" for word in range(20)) for line in range(lines)]
    path.write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    return path


def write_config(path: Path, source: str = "ds_tiny.json", **fields: Any) -> Path:
    """Write a shipped configuration with changed fields, and with torch's optimizer, which needs no compiler."""
    config = json.loads((ROOT / "configs" / source).read_text())
    zero = {**config["zero_optimization"], **BUCKETS, **fields.pop("zero_optimization", {})}
    config |= {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False, **fields}
    config["optimizer"]["params"]["torch_adam"] = True
    path.write_text(json.dumps(config))
    return path


OFFLOADING = ["ds_zero2_offload.json", "ds_zero3_offload.json"]
TILED = {"stage 2": 2, "stage 3": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of models, a tokenizer, text and configurations, all small."""
    folder = tmp_path_factory.mktemp("recipe")
    save_tokenizer(folder / "tokenizer")
    save_model(folder / "llama", vocab_size=WORDS)
    save_model(folder / "mixtral", mixture=True)
    save_text(folder / "text.jsonl")
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return each rank's results of each case."""
    short = ["--steps", "2", "--seq-len", "32", "--memplug", "none"]
    words = ["--tokenizer", f"{folder}/tokenizer", "--data", f"{folder}/text.jsonl"]
    cases = {}
    for stage in (1, 3):
        config = write_config(folder / f"ds{stage}.json", zero_optimization={"stage": stage})
        where = [*short, "--deepspeed_config", str(config)]
        cases[f"llama {stage}"] = [*where, "--weights", f"{folder}/llama", *words]
        cases[f"mixtral {stage}"] = [*where, "--weights", f"{folder}/mixtral"]
    for name in OFFLOADING:
        swap = {"enabled": True, "tokenwise": {"min_offload_bytes": 1}, "arena": {"enabled": False}}
        config = write_config(folder / name, name, memplug=swap)
        swapping = [*short[:-1], "attach", "--alpha", "1", "--deepspeed_config", str(config)]
        cases[name] = swapping
    descent = {"type": "SGD", "params": {"lr": 0.2}}  # unlike Adam's, its steps are as long as the gradients
    for name, stage in TILED.items():
        fields = {"zero_optimization": {"stage": stage}, "optimizer": descent, "gradient_accumulation_steps": 2}
        config = write_config(folder / f"descent{stage}.json", **fields)
        constant = json.loads(config.read_text())
        constant["zero_allow_untested_optimizer"] = True
        del constant["scheduler"], constant["gradient_clipping"], constant["optimizer"]["params"]["torch_adam"]
        config.write_text(json.dumps(constant))
        for tiles in (1, 3):
            where = ["--steps", "4", *short[2:], "--deepspeed_config", str(config)]
            cases[f"{name}, {tiles}"] = [*where, "--tiled-loss", str(tiles)]
    launch_forked(["tests.support.recipe_worker", folder, json.dumps(cases)], module=True, time_limit_s=300)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    return {name: [rank[name] for rank in ranks] for name in cases}


def first_loss(folder: Path, name: str, stage: int) -> float:
    """Return the saved model's loss on the recipe's first batches of both ranks, without DeepSpeed."""
    model = (MixtralForCausalLM if name == "mixtral" else LlamaForCausalLM).from_pretrained(folder / name)
    words = ["--tokenizer", f"{folder}/tokenizer", "--data", f"{folder}/text.jsonl"] if name == "llama" else []
    where = ["--deepspeed_config", f"{folder}/ds{stage}.json", "--seq-len", "32", "--check"]
    args = settings.parse_args([*where, "--weights", f"{folder}/{name}", *words])
    inputs = settings.read(args, checks.Ranks(count=2))
    total = 0.0
    for rank in (0, 1):
        batches, _ = checks.make_batches(
            inputs.tokens, seq_len=32, micro_batch=4, rank=rank, world_size=2, seed=args.seed
        )
        with torch.no_grad():
            total += model(input_ids=batches[0], labels=batches[0]).loss.item() / 2
    return total


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_training_starts_from_weights_in_a_folder(name: str, stage: int, folder: Path, runs: Any) -> None:
    expected = first_loss(folder, name, stage)
    # rounding depends on the machine, and may change the expert of a token near a tie
    tolerance = 1e-3 if name == "mixtral" else 1e-4
    for result in runs[f"{name} {stage}"]:
        assert result["losses"][0] == pytest.approx(expected, rel=tolerance)
        assert result["dtype"] == ("torch.int32" if name == "llama" else "torch.int16")


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize("name", OFFLOADING)
def test_shipped_offloading_configuration_trains_on_two_processes(name: str, runs: Any) -> None:
    first, second = runs[name]
    assert first["losses"] == second["losses"] and len(set(first["losses"])) == 2
    assert first["offloads"] and first["swapped"] > 0, "DeepSpeed offloads, and memplug too"


@pytest.mark.distributed
@pytest.mark.parametrize("name", TILED)
def test_tiled_loss_trains_like_untiled_loss_under_zero_and_accumulation(name: str, runs: Any) -> None:
    whole, tiled = (runs[f"{name}, {tiles}"][0]["losses"] for tiles in (1, 3))
    assert tiled == pytest.approx(whole, rel=1e-4)  # kernels of other shapes round differently
    assert whole[-1] < whole[0] - 0.1, "a scaled gradient would show"


@pytest.mark.parametrize("mixture", [False, True])
@pytest.mark.parametrize("with_memplug", [False, True])
def test_tiled_loss_has_the_gradients_of_the_untiled_loss(mixture: bool, with_memplug: bool) -> None:
    def gradients(tiles: int) -> tuple[torch.Tensor, list[torch.Tensor], bool]:
        torch.manual_seed(0)
        made = (
            MixtralForCausalLM(MixtralConfig(**SIZES, **EXPERTS)) if mixture else LlamaForCausalLM(LlamaConfig(**SIZES))
        )
        model = tiled_loss.tile_loss(made, tiles)
        labels = torch.randint(0, 300, (2, 23))
        tokens, labels[0, 5:9] = labels.clone(), -100
        block = {"enabled": True, "tokenwise": {"min_offload_bytes": 1, "alpha": 1.0}, "plan_dir": False}
        session = memplug.attach(model, block) if with_memplug else None
        outputs = model(input_ids=tokens, labels=labels)
        (outputs.loss / 2).backward()  # like DeepSpeed with two micro-batches per step
        if session is not None:
            assert session.report().tokenwise.forwards == 2
            session.detach()
        return outputs.loss.detach(), [parameter.grad for parameter in model.parameters()], outputs.logits is None

    (whole, expected, _), (tiled, found, no_logits) = gradients(1), gradients(4)
    assert no_logits, "no tensor holds all logits"
    torch.testing.assert_close(tiled, whole)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


class Memory(TorchDispatchMode):
    """Measures the peak bytes of the tensors that are made while the mode is active."""

    live_bytes = peak_bytes = 0

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.storages:
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        place, nbytes = storage.data_ptr(), storage.nbytes()
        self.storages.add(place)
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

        def freed() -> None:
            self.live_bytes -= nbytes
            self.storages.discard(place)

        weakref.finalize(storage, freed)


@pytest.mark.parametrize("tiles", [1, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_and_loss_take_the_estimated_memory(dtype: torch.dtype, tiles: int) -> None:
    sizes = {**SIZES, "vocab_size": 8000, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = tiled_loss.tile_loss(LlamaForCausalLM(LlamaConfig(**sizes)).to(dtype), tiles)
    tokens = torch.randint(0, 8000, (1, 513))
    with Memory() as held:
        model(input_ids=tokens, labels=tokens).loss.backward()
    assert held.peak_bytes == pytest.approx(memory.logits_bytes(8000, 512, tiles), rel=0.15)


def test_only_one_tile_has_logits_at_a_time() -> None:
    head, sizes = torch.nn.Linear(8, 50), []
    head.register_forward_hook(lambda module, inputs, output: sizes.append(output.shape[0]))
    labels = torch.arange(20).reshape(2, 10)
    tiled_loss.tiled_loss(head, torch.randn(2, 10, 8), labels, tiles=4).backward()
    assert max(sizes) == 5 and len(sizes) == 8, "18 tokens in four tiles, forward and again in backward"


def test_folder_tokenizer_separates_texts_and_keeps_ids_beyond_int16(tmp_path: Path) -> None:
    tokenizer = text.FolderTokenizer(save_tokenizer(tmp_path / "tokenizer"))
    (tmp_path / "text.jsonl").write_text('{"text": "w39999 w2"}\n\n{"text": "nothing", "more": 1}\n')
    tokens = text.load_tokens(tmp_path / "text.jsonl", tokenizer)
    assert tokens.dtype == torch.int32 and tokens.tolist() == [39999, 2, 1, 0, 1]
    small = text.FolderTokenizer(save_tokenizer(tmp_path / "small", words=32768))
    assert small.encode(b"w32767").dtype == "int16" and small.encode(b"w32767").tolist() == [32767, 1]


@pytest.mark.parametrize("line", ["no json", '["text"]', '{"words": "a"}', '{"text": 3}'])
def test_json_line_without_text_is_refused_with_its_line_number(line: str, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text(f'{{"text": "a"}}\n{line}\n')
    with pytest.raises(ValueError, match="line 2"):
        text.load_tokens(tmp_path / "text.jsonl", text.ByteTokenizer())
