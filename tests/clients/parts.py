"""The type of cases, and their parts: tiny models, text, tokenizers, lines of examples/README.md, digests."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.folders import ROOT

README = ROOT / "examples/README.md"
VOCABULARY = 96
LENGTH = 32
WORDS = [f"w{i}" for i in range(VOCABULARY - 4)]
STEPS = 8
RUN = [sys.executable, "-c", "from memplug.cli import main; main()", "run"]
Block = dict[str, Any]
Outcome = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One training, with memplug and without.

    Attributes:
        parts: Functions that run one after the other in one folder, each in a process of its own, with memplug's block
            or without. Each function returns the "losses", the "model", the number of "steps", and whatever else a
            test needs.
        needs: Packages without which the case is left out.
        ranks: The number of processes for each part.
        planned: Another block to run the case with; under this block memplug makes a plan.
    """

    parts: tuple[Callable[[Block | None], Outcome], ...]
    needs: tuple[str, ...] = ()
    ranks: int = 1
    planned: Block | None = None

    @property
    def ways(self) -> dict[str, Block | None]:
        """The blocks of memplug to run the case with, by the name of the way."""
        ways: dict[str, Block | None] = {"without": None, "with": block(alpha=1)}
        return ways if self.planned is None else {**ways, "planned": self.planned}


def block(warmup_steps: int = 0, policy_steps: int = 0, **tokenwise: Any) -> Block:
    """Return a block with which memplug swaps even the smallest tensor, and plans as soon as possible.

    With an alpha, memplug makes no plan. With an alpha of 1, results are bit-identical; a plan may split the rows of a
    matmul, which rounds differently. No value is "auto", since Accelerate would want to fill in such a value.
    """
    return {
        "enabled": True,
        "plan_dir": False,
        "profiler": {"warmup_steps": warmup_steps, "policy_steps": policy_steps},
        "tokenwise": {"min_offload_bytes": 1, **tokenwise},
    }


def llama(seed: int = 0) -> nn.Module:
    """Return a model of two layers; calls with the same seed return the same weights."""
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
    """Return samples of `LENGTH` tokens each; the tokens are the labels too."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(4, VOCABULARY, (count, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def batches(count: int, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Return batches of two samples each."""
    rows = samples(2 * count, seed)
    return [{key: torch.stack([rows[i][key], rows[i + 1][key]]) for key in rows[i]} for i in range(0, 2 * count, 2)]


def sentences(count: int, words: int, seed: int = 1) -> list[str]:
    """Return sentences of the given number of words each."""
    rows = torch.randint(0, len(WORDS), (count, words), generator=torch.Generator().manual_seed(seed))
    return [" ".join(WORDS[i] for i in row) for row in rows.tolist()]


def tokenizer() -> Any:
    """Return a tokenizer with one token per word."""
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
    """Return a digest of all weights, gathered if ZeRO 3 or FSDP has split them."""
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


def write_ds(memplug: Block | None, stage: int | None = None, accumulation: int = 1, optimizer: bool = True) -> None:
    """Write ds.json into the working directory; without a stage, the file holds memplug's block alone."""
    config: dict[str, Any] = {}
    if stage is not None:
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": accumulation,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 100_000},
        }
        if optimizer:
            config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
        if stage == 3:
            config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    Path("ds.json").write_text(json.dumps(config if memplug is None else {**config, "memplug": memplug}))


def lines_of(title: str, memplug: bool) -> str:
    """Return the Python lines of a section of examples/README.md.

    Without memplug, the lines that name memplug or its session are left out.
    """
    section = re.search(rf"^### {re.escape(title)}\n(.*?)(?=^##|\Z)", README.read_text(), re.S | re.M)
    assert section is not None, f"examples/README.md has no section {title}"
    code = re.search(r"```python\n(.*?)```", section[1], re.S)[1]
    if memplug:
        return code
    code = code.replace('callbacks=[MemplugCallback("ds.json")], ', "")
    return "\n".join(line for line in code.splitlines() if not re.search(r"memplug|Memplug|session", line))


def run_lines(title: str, memplug: Block | None, **names: Any) -> dict[str, Any]:
    """Run the lines of a section, and return the names that they define."""
    exec(compile(lines_of(title, memplug is not None), f"examples/README.md, {title}", "exec"), names)
    return names
