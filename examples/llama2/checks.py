"""Checks of a run's inputs before its model is built; shared with the recipe of Megatron-Core."""

import importlib
import json
import logging
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from data import Batches, split, tokens_wanted
from memory import GIB, Estimate
from text import DEFAULT_TOKENS, ByteTokenizer, FolderTokenizer, Tokenizer, load_tokens

RANKS_OF_A_MACHINE = 8  # assumed for `--check N`
MODEL_TYPES = ("llama", "mixtral", "qwen3")
ATTENTION_PACKAGES = {"flash": "flash_attn", "te": "transformer_engine.pytorch"}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


@dataclass(kw_only=True)
class Inputs:
    """The inputs that a run reads before it builds anything, and all problems with them."""

    problems: list[str] = field(default_factory=list)
    shape: dict[str, Any] = field(default_factory=dict)
    """Shape of the model; empty where it could not be read."""
    config: dict[str, Any] = field(default_factory=dict)
    """DeepSpeed's configuration."""
    tokens: torch.Tensor | None = None
    estimate: Estimate | None = None


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The number of processes of a run, and of machines that they run on."""

    count: int
    machines: int = 1

    @classmethod
    def of(cls, args: Namespace) -> "Ranks":
        """Return the ranks that `--check N` names, or else those of the launcher."""
        count = args.check or int(os.environ.get("WORLD_SIZE", 1))
        of_a_machine = RANKS_OF_A_MACHINE if args.check else int(os.environ.get("LOCAL_WORLD_SIZE", count))
        return cls(count=count, machines=max(1, count // of_a_machine))


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of text, checks and the log."""
    add = parser.add_argument
    add(
        "--data",
        type=Path,
        help='text: a file, a folder of files, or .jsonl with a "text" in each line; '
        "if not given, Python's own standard library",
    )
    add("--tokenizer", type=Path, help="local folder of a Hugging Face tokenizer; if not given, each byte is a token")
    add(
        "--check",
        type=int,
        nargs="?",
        const=0,
        metavar="N",
        help="read everything, check it for N ranks (if not given: WORLD_SIZE's), estimate the memory, and end",
    )
    add("--gpu-gib", type=float, help="memory of a GPU, for the estimate; if not given, that of the GPU here")
    add("--loss-log", type=Path, help="file that gets a JSON line per step, and the report")
    add("--host-gib", type=float, help="memory of a machine's host, for the estimate with offloading")


def read_shape(inputs: Inputs, path: Path) -> None:
    """Read the shape of a model from YAML, or from the config.json of a Hugging Face folder."""
    if path.is_dir():
        path = path / "config.json"
    try:
        # a YAML parser reads JSON too, but takes 1e-06 for a string
        shape = (json.loads if path.suffix == ".json" else yaml.safe_load)(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        inputs.problems.append(f"cannot read the model's shape from {path}: {error}")
        return
    shape = shape if isinstance(shape, dict) else {}
    if shape.get("model_type", "llama") not in MODEL_TYPES:
        inputs.problems.append(
            f"{path} is the shape of a {shape['model_type']}: this recipe trains a llama, a mixtral or a qwen3"
        )
        return
    own_heads = shape.get("model_type") == "qwen3"  # head_dim is a field of its own
    missing = [name for name in (*_SIZES, *["head_dim"] * own_heads) if not isinstance(shape.get(name), int)]
    if missing:
        named = ", ".join(missing)
        inputs.problems.append(f"{path} is not the shape of a Llama, a Mixtral or a Qwen3: no number for {named}")
        return
    has_experts = bool(shape.get("num_local_experts"))
    if "model_type" in shape and has_experts != (shape["model_type"] == "mixtral"):
        number = shape.get("num_local_experts", "no number")
        inputs.problems.append(f"{path} is the shape of a {shape['model_type']}, but num_local_experts is {number}")
        return
    inputs.shape = shape
    hidden, heads, groups = (shape[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    if not own_heads:
        divides(inputs, heads, hidden, f"{path}: num_attention_heads", "hidden_size")
    divides(inputs, groups, heads, f"{path}: num_key_value_heads", "num_attention_heads")
    if shape.get("num_experts_per_tok", 0) > shape.get("num_local_experts", 0):
        inputs.problems.append(f"{path}: num_experts_per_tok is more than num_local_experts")


def divides(inputs: Inputs, divisor: int, number: int, divisor_name: str, number_name: str) -> None:
    """Add a problem unless `divisor` divides `number`."""
    if divisor < 1 or number % divisor:
        inputs.problems.append(f"{divisor_name} ({divisor}) has to divide {number_name} ({number})")


def check_attention(inputs: Inputs, args: Namespace, bf16: bool, remedy: str) -> None:
    """Check that --attention has the package, the GPU and the weights that it needs.

    Args:
        inputs: gets the problems.
        args: "attention", and "check": `--check N` may describe a run on another machine, so packages are not checked.
        bf16: whether weights are in bfloat16, not in float32.
        remedy: how to get weights in bfloat16.
    """
    flash, package = args.attention == "flash", ATTENTION_PACKAGES.get(args.attention)
    if flash and not bf16:
        inputs.problems.append(f"--attention flash needs weights in bfloat16, and these are in float32: {remedy}")
    if package is None or args.check:
        return
    try:
        importlib.import_module(package)
    except Exception as error:  # a package built for another torch raises errors of all kinds
        inputs.problems.append(f"--attention {args.attention} needs {package}, which cannot be imported: {error}")
        return
    if flash and not has_gpu():
        inputs.problems.append("--attention flash needs a GPU, and there is none here")


def has_gpu() -> bool:
    """Return whether this machine has a GPU that torch can use."""
    return torch.cuda.is_available()


def positive(inputs: Inputs, args: Namespace, *names: str) -> None:
    """Add a problem for each option that is not at least 1."""
    for name in names:
        if getattr(args, name) < 1:
            inputs.problems.append(f"--{name.replace('_', '-')} is {getattr(args, name)}: at least 1")


def read_text(inputs: Inputs, args: Namespace, batch_tokens: int) -> None:
    """Read the tokens, and check them against the vocabulary and the size of a micro-batch of all ranks.

    Args:
        inputs: has the shape, if it could be read; gets tokens and problems.
        args: "data" and "tokenizer".
        batch_tokens: tokens of one micro-batch of all ranks together.
    """
    tokenizer: Tokenizer = ByteTokenizer()
    try:
        if args.tokenizer is not None:
            tokenizer = FolderTokenizer(args.tokenizer)
        tokens = load_tokens(args.data, tokenizer, max(DEFAULT_TOKENS, tokens_wanted(batch_tokens)))
    except (OSError, ValueError) as error:
        inputs.problems.append(str(error))
        return
    if inputs.shape and tokenizer.vocab_size > inputs.shape["vocab_size"]:
        named = args.tokenizer or "bytes"
        inputs.problems.append(
            f"the vocabulary of the model has {inputs.shape['vocab_size']} tokens, {named} need {tokenizer.vocab_size}"
        )
    if len(tokens) < 2 * batch_tokens:
        inputs.problems.append(
            f"{args.data or 'the default text'} has {len(tokens):,} tokens, and one micro-batch of all ranks to train "
            f"on and one to validate with are {2 * batch_tokens:,}: give more text with --data, or lower --seq-len or "
            "the micro-batch size"
        )
    inputs.tokens = tokens


def check_loss_log(inputs: Inputs, args: Namespace) -> None:
    """Add a problem if the folder of --loss-log does not exist."""
    if args.loss_log is not None and not args.loss_log.parent.is_dir():
        inputs.problems.append(f"--loss-log {args.loss_log}: there is no folder {args.loss_log.parent}")


def read_memplug(inputs: Inputs, source: Mapping[str, Any] | Path) -> None:
    """Check the "memplug" block of a DeepSpeed configuration, or of a file."""
    from memplug.config import load_config, read_ds_config
    from memplug.errors import ConfigError

    try:
        load_config(source) if isinstance(source, Path) else read_ds_config(source)
    except ConfigError as error:
        inputs.problems += error.problems


def make_batches(tokens: torch.Tensor, **where: int) -> tuple[Batches, Batches]:
    """Return a rank's batches to train on and to validate with.

    Args:
        tokens: the whole text, [tokens].
        where: fields of `Batches`.
    """
    batch_tokens = where["seq_len"] * where["micro_batch"] * where["world_size"]
    train_tokens, validation_tokens = split(tokens, batch_tokens)
    return Batches(tokens=train_tokens, **where), Batches(tokens=validation_tokens, **where)


def device_gib(args: Namespace) -> float | None:
    """Return the memory of a rank's device: from the command line, or else of the GPU here, or None."""
    if args.gpu_gib is None and torch.cuda.is_available():
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / GIB
    return args.gpu_gib


def describe(inputs: Inputs, args: Namespace) -> tuple[str, bool]:
    """Return the text that `--check` prints, and whether the run can start."""
    parts, fine = [], not inputs.problems
    if inputs.estimate is not None:
        parts.append(inputs.estimate.render(device_gib(args), args.host_gib))
        fine = fine and inputs.estimate.fits(device_gib(args), args.host_gib)
    if inputs.tokens is not None:
        parts.append(f"{len(inputs.tokens):,} tokens of text\n")
    parts += [f"problem: {problem}\n" for problem in inputs.problems]
    return "".join([*parts, "the run can start\n" if fine else "the run cannot start like this\n"]), fine


def agree(inputs: Inputs, args: Namespace, log: logging.Logger) -> None:
    """Log the estimate on rank 0, and end the run on all ranks if one of them found a problem.

    Raises:
        SystemExit: there are problems; rank 0 has logged all of them.
    """
    found: list[Sequence[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(found, inputs.problems)
    problems = {problem: [rank for rank, theirs in enumerate(found) if problem in theirs] for problem in sum(found, [])}
    if inputs.estimate is not None:
        log.info("%s", inputs.estimate.render(device_gib(args), args.host_gib).rstrip())  # only rank 0 logs this
    if not problems:
        return
    lines = [
        f"  {problem}" + ("" if len(ranks) == len(found) else f" (rank {', '.join(map(str, ranks))})")
        for problem, ranks in problems.items()
    ]
    if dist.get_rank() == 0:
        log.error("the run cannot start like this:\n%s", "\n".join(lines))
    dist.barrier()  # wait for the log: a launcher kills all ranks once one has ended
    dist.destroy_process_group()
    raise SystemExit(1)
