"""The command line of the DeepSpeed recipe, and the files that it names, checked before the model is built."""

import argparse
import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import checks
from checks import Inputs, Ranks
from memory import deepspeed_estimate, logits_bytes

ROOT = Path(__file__).resolve().parents[2]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Trains a Llama, a Mixtral or a Qwen3 on text with DeepSpeed and memplug.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        default=ROOT / "configs/models/tiny.yaml",
        help="fields of LlamaConfig, MixtralConfig or Qwen3Config, as YAML",
    )
    add(
        "--weights",
        type=Path,
        help="local folder of a Hugging Face model to continue from; its config.json replaces --model",
    )
    add("--deepspeed_config", type=Path, default=ROOT / "configs/ds_tiny.json", help="DeepSpeed's JSON")
    add("--steps", type=int, default=60, help="optimizer steps, counted from the first run's start")
    add("--seq-len", type=int, default=256, help="tokens of a sequence")
    add("--attention", choices=("sdpa", "flash"), default="sdpa", help="torch's, or flash-attn's (bf16, GPU)")
    add("--context", type=int, default=1, metavar="N", help="ranks that share each sequence (DeepSpeed's Ulysses)")
    add("--tiled-loss", type=int, default=1, metavar="TILES", help="compute logits and loss in this many parts")
    checks.add_arguments(parser)
    add("--save-dir", type=Path, help="folder of the checkpoints, shared by all ranks; one is saved at the end")
    add("--save-every", type=int, default=0, help="steps between checkpoints; 0: at the end only")
    add("--resume", action="store_true", help="continue from the latest checkpoint in --save-dir, if there is one")
    add("--eval-every", type=int, default=0, help="steps between validations; 0: at the end only")
    add("--eval-batches", type=int, default=4, help="micro-batches of a rank in one validation")
    add("--seed", type=int, default=0, help="seed of the weights and of the order of the data")
    add("--memplug", choices=("install", "attach", "none"), default="install", help="how memplug is activated")
    add("--zero-stage", type=int, choices=(0, 1, 2, 3), help="overrides the JSON's ZeRO stage")
    add("--alpha", help="overrides the JSON's memplug.tokenwise.alpha: 0 to 1, auto or memo")
    add("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)), help="set by the launcher")
    args = parser.parse_args(argv)
    if args.check is None and "RANK" not in os.environ:
        parser.error("start me with torchrun, with deepspeed, or with a script in launch/; or give --check")
    return args


def read(args: argparse.Namespace, ranks: Ranks) -> Inputs:
    """Read all inputs of a run of `ranks`.

    Nothing is raised: `problems` of the result has all problems.
    """
    inputs = Inputs()
    checks.positive(inputs, args, "steps", "seq_len", "eval_batches", "tiled_loss", "context")
    checks.read_shape(inputs, args.weights or args.model)
    _read_config(inputs, args)
    _check_saves(inputs, args, ranks.count)
    checks.check_loss_log(inputs, args)
    data_parallel = max(1, ranks.count // max(1, args.context))
    micro_batch, micro_batches = batch_sizes(inputs, data_parallel)
    if inputs.config:
        bf16 = bool(inputs.config.get("bf16", {}).get("enabled"))
        checks.check_attention(inputs, args, bf16, 'set "bf16" in DeepSpeed\'s JSON')
    if inputs.shape:
        _check_context(inputs, args, ranks.count)
    if inputs.problems:
        return inputs  # further checks would only repeat them
    # if ranks share sequences, DeepSpeed's number of data-parallel ranks is a float, so no size may be derived from it
    inputs.config.pop("train_batch_size", None)
    inputs.config |= {"train_micro_batch_size_per_gpu": micro_batch, "gradient_accumulation_steps": micro_batches}
    checks.read_text(inputs, args, args.seq_len * micro_batch * data_parallel)
    if args.memplug != "none":
        checks.read_memplug(inputs, inputs.config)
    tokens = args.seq_len // args.context * micro_batch
    logits = logits_bytes(inputs.shape["vocab_size"], tokens, args.tiled_loss)
    inputs.estimate = deepspeed_estimate(inputs.shape, inputs.config, ranks.count, ranks.machines, logits)
    if args.context > 1:
        inputs.estimate.notes["on"] += f", context {args.context}"
    return inputs


def _check_context(inputs: Inputs, args: argparse.Namespace, ranks: int) -> None:
    """Add a problem for each setting that DeepSpeed's Ulysses would refuse."""
    if args.context < 2:
        return
    heads, groups = (inputs.shape[name] for name in ("num_attention_heads", "num_key_value_heads"))
    checks.divides(inputs, args.context, ranks, "--context", "the number of ranks")
    checks.divides(inputs, args.context, heads, "--context", "the model's num_attention_heads")
    if groups % args.context and args.context % groups:
        either = f"divide the model's num_key_value_heads ({groups}), or be a multiple of it"
        inputs.problems.append(f"--context ({args.context}) has to {either}")
    checks.divides(inputs, args.context, args.seq_len, "--context", "--seq-len")
    if args.seq_len == args.context:  # the last token has no label
        inputs.problems.append("--seq-len has to be at least twice --context")
    if args.check is None:
        try:
            importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")
        except ImportError as error:
            inputs.problems.append(
                f"--context needs a newer DeepSpeed, with Ulysses for Hugging Face's models: {error}"
            )


def batch_sizes(inputs: Inputs, ranks: int) -> tuple[int, int]:
    """Return the sequences of a micro-batch and the micro-batches of a step, by DeepSpeed's rules.

    Args:
        inputs: has DeepSpeed's configuration; gets the problems.
        ranks: number of data-parallel ranks.

    Returns:
        Both numbers; 1, 1 where the configuration does not say or has a problem.
    """
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = {name: inputs.config[name] for name in names if inputs.config.get(name) is not None}
    if any(not isinstance(value, int) or value < 1 for value in given.values()):
        inputs.problems.append(f"batch sizes have to be integers of at least 1, not {given}")
        return 1, 1
    total, micro, steps = (given.get(name) for name in names)
    if total is None and micro is None:
        if inputs.config:
            inputs.problems.append("DeepSpeed's JSON has neither train_micro_batch_size_per_gpu nor train_batch_size")
        return 1, 1
    micro = micro or max(1, total // ranks // (steps or 1))
    steps = steps or (1 if total is None else max(1, total // micro // ranks))
    if total is not None and total != micro * steps * ranks:
        inputs.problems.append(
            f"train_batch_size is {total}, and {ranks} ranks × {steps} micro-batches of {micro} are "
            f"{ranks * steps * micro}: change one of them in DeepSpeed's JSON"
        )
    return micro, steps


def _read_config(inputs: Inputs, args: argparse.Namespace) -> None:
    """Read DeepSpeed's JSON, which holds the memplug block, and apply the command line's overrides."""
    try:
        config = json.loads(args.deepspeed_config.read_text())
    except (OSError, ValueError) as error:
        inputs.problems.append(f"cannot read DeepSpeed's JSON {args.deepspeed_config}: {error}")
        return
    if not isinstance(config, dict):
        inputs.problems.append(f"DeepSpeed's JSON {args.deepspeed_config} holds no object")
        return
    if args.zero_stage is not None:
        config.setdefault("zero_optimization", {})["stage"] = args.zero_stage
    if args.alpha is not None:
        config.setdefault("memplug", {}).setdefault("tokenwise", {})["alpha"] = _number_or_word(args.alpha)
    inputs.config = config
    _check_offloading(inputs, config.get("zero_optimization", {}))


def _number_or_word(value: str) -> float | str:
    try:
        return float(value)
    except ValueError:
        return value


def _check_offloading(inputs: Inputs, zero: Mapping[str, Any]) -> None:
    stage = zero.get("stage", 0)
    for what, lowest in (("offload_optimizer", 1), ("offload_param", 3)):
        if (zero.get(what) or {}).get("device", "none") != "none" and stage < lowest:
            inputs.problems.append(f"{what} needs ZeRO {lowest} or more, and the stage is {stage}")


def _check_saves(inputs: Inputs, args: argparse.Namespace, ranks: int) -> None:
    if args.save_dir is None:
        if args.resume or args.save_every:
            inputs.problems.append("--resume and --save-every need --save-dir")
        return
    if args.save_dir.exists() and not args.save_dir.is_dir():
        inputs.problems.append(f"--save-dir {args.save_dir} is a file")
        return
    import checkpoint  # imported only here, since it imports DeepSpeed, which takes seconds

    tag = checkpoint.latest(args.save_dir)
    if tag is None:
        return
    if not args.resume:
        hint = "add --resume, or choose another --save-dir"
        inputs.problems.append(f"{args.save_dir} holds the checkpoint {tag}: {hint}")
        return
    saved, stage = checkpoint.ranks_of(args.save_dir, tag), inputs.config.get("zero_optimization", {}).get("stage", 0)
    if ranks > saved or (stage and ranks < saved):  # DeepSpeed does not repartition the optimizer's state
        inputs.problems.append(f"{args.save_dir}/{tag} was saved by {saved} ranks, and this run has {ranks}")
