"""What the cases train: tiny models, text, tokenizers, the lines of examples/README.md, and digests of weights."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

README = Path(__file__).resolve().parents[2] / "examples/README.md"
VOCABULARY = 96
LENGTH = 32
WORDS = [f"w{i}" for i in range(VOCABULARY - 4)]


def block(alpha: float | str = 1, **fields: Any) -> dict[str, Any]:
    """One that swaps even the smallest tensor and plans after two steps.

    A number for alpha keeps rows together, so that results are equal to the bit wherever rows of a matmul are not.
    """
    return {
        "enabled": True,
        "plan_dir": False,
        "profiler": {"warmup_steps": 0, "policy_steps": 0},
        "tokenwise": {"alpha": alpha, "min_offload_bytes": 1},
        **fields,
    }


def llama(seed: int = 0) -> nn.Module:
    """Two layers; the same weights at every call with the same seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def samples(count: int, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Each of `LENGTH` tokens, that are the labels too."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(4, VOCABULARY, (count, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def batches(count: int, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Each of two samples."""
    rows = samples(2 * count, seed)
    return [{key: torch.stack([rows[i][key], rows[i + 1][key]]) for key in rows[i]} for i in range(0, 2 * count, 2)]


def sentences(count: int, words: int, seed: int = 1) -> list[str]:
    """Of at most so many words; they differ in length."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(words // 2, words + 1, (count,), generator=generator).tolist()
    return [
        " ".join(WORDS[i] for i in torch.randint(0, len(WORDS), (length,), generator=generator).tolist())
        for length in lengths
    ]


def tokenizer() -> Any:
    """One token a word."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    core = Tokenizer(WordLevel({word: i for i, word in enumerate([*special, *WORDS])}, unk_token="<unk>"))
    core.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def digest(model: nn.Module) -> str:
    """Of all weights, gathered where ZeRO 3 or FSDP has split them."""
    parameters = list(model.named_parameters())
    total = hashlib.sha256()
    with _gathered([parameter for _, parameter in parameters]):
        for name, parameter in parameters:
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            total.update(re.sub(r"^(module|_forward_module)\.", "", name).encode())
            total.update(whole.detach().float().contiguous().numpy().tobytes())
    return total.hexdigest()[:16]


@contextlib.contextmanager
def _gathered(parameters: list[nn.Parameter]) -> Iterator[None]:
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters):
        yield


def write_ds(memplug: Mapping[str, Any] | None, stage: int | None = None, accumulation: int = 1) -> None:
    """ds.json in the working directory; without a stage, no more than memplug's block."""
    config: dict[str, Any] = {}
    if stage is not None:
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": accumulation,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 100_000},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        }
        if stage == 3:
            config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    Path("ds.json").write_text(json.dumps(config if memplug is None else {**config, "memplug": memplug}))


def lines_of(title: str, memplug: bool) -> str:
    """The Python of a section of examples/README.md; without memplug: less the lines that name it or its session."""
    section = re.search(rf"^### {re.escape(title)}\n(.*?)(?=^##|\Z)", README.read_text(), re.S | re.M)
    assert section is not None, f"examples/README.md has no section {title}"
    code = re.search(r"```python\n(.*?)```", section[1], re.S)[1]
    if memplug:
        return code
    code = code.replace('callbacks=[MemplugCallback("ds.json")], ', "")
    return "\n".join(line for line in code.splitlines() if not re.search(r"memplug|Memplug|session", line))


def run_lines(title: str, memplug: bool, **names: Any) -> dict[str, Any]:
    """Runs a section's lines; returns the names that they leave."""
    exec(compile(lines_of(title, memplug), f"examples/README.md, {title}", "exec"), names)
    return names
