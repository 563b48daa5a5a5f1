"""The command line of the DeepSpeed recipe, and the files that it names: read and checked before the model is built."""

import argparse
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
    parser = argparse.ArgumentParser(
        description="Trains a Llama-2 or a Mixtral on text with DeepSpeed and memplug.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        default=ROOT / "configs/models/tiny.yaml",
        help="fields of LlamaConfig or MixtralConfig, as YAML",
    )
    add(
        "--weights",
        type=Path,
        help="local folder of a Hugging Face Llama or Mixtral to go on from; its config.json counts, not --model",
    )
    add("--deepspeed_config", type=Path, default=ROOT / "configs/ds_tiny.json", help="DeepSpeed's JSON")
    add("--steps", type=int, default=60, help="optimizer steps, counted from the first run's start")
    add("--seq-len", type=int, default=256, help="tokens of a sequence")
    add("--tiled-loss", type=int, default=1, metavar="TILES", help="compute logits and loss in so many parts")
    checks.add_arguments(parser)
    add("--save-dir", type=Path, help="folder of the checkpoints, shared by all ranks; one is saved at the end")
    add("--save-every", type=int, default=0, help="steps between checkpoints; 0: at the end only")
    add("--resume", action="store_true", help="go on from the latest checkpoint in --save-dir, if there is one")
    add("--eval-every", type=int, default=0, help="steps between validations; 0: at the end only")
    add("--eval-batches", type=int, default=4, help="micro-batches of a rank in one validation")
    add("--seed", type=int, default=0, help="of the weights and of the order of the data")
    add("--memplug", choices=("install", "attach", "none"), default="install", help="how memplug gets in")
    add("--loss-log", type=Path, help="file to add a JSON line per step to, and the report")
    add("--zero-stage", type=int, choices=(0, 1, 2, 3), help="instead of the JSON's")
    add("--alpha", help="instead of the JSON's memplug.tokenwise.alpha: from 0 to 1, or auto")
    add("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)), help="set by the launcher")
    args = parser.parse_args(argv)
    if args.check is None and "RANK" not in os.environ:
        parser.error("start me with torchrun, with deepspeed, or with a script in launch/; or give --check")
    return args


def read(args: argparse.Namespace, ranks: Ranks) -> Inputs:
    """Reads all that a run of `ranks` needs; what is wrong with it is in `problems`, nothing is raised."""
    inputs = Inputs()
    checks.positive(inputs, args, "steps", "seq_len", "eval_batches", "tiled_loss")
    checks.read_shape(inputs, args.weights or args.model)
    _read_config(inputs, args)
    _check_saves(inputs, args, ranks.count)
    if args.loss_log is not None and not args.loss_log.parent.is_dir():
        inputs.problems.append(f"--loss-log {args.loss_log}: there is no folder {args.loss_log.parent}")
    micro_batch, _ = batch_sizes(inputs, ranks.count)
    if inputs.problems:
        return inputs  # what follows would only repeat them
    checks.read_text(inputs, args, args.seq_len * micro_batch * ranks.count)
    if args.memplug != "none":
        checks.read_memplug(inputs, inputs.config)
    logits = logits_bytes(inputs.shape["vocab_size"], args.seq_len * micro_batch, args.tiled_loss)
    inputs.estimate = deepspeed_estimate(inputs.shape, inputs.config, ranks.count, ranks.machines, logits)
    return inputs


def batch_sizes(inputs: Inputs, ranks: int) -> tuple[int, int]:
    """Returns sequences of a rank's micro-batch and micro-batches of a step, by DeepSpeed's rules; 1, 1 if unclear."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = {name: inputs.config[name] for name in names if inputs.config.get(name) is not None}
    if any(not isinstance(value, int) or value < 1 for value in given.values()):
        inputs.problems.append(f"sizes of batches are numbers of at least 1, not {given}")
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
    """DeepSpeed's JSON, which holds the memplug block, with what the command line overrides."""
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
    import checkpoint  # not above: it imports DeepSpeed, which takes seconds

    tag = checkpoint.latest(args.save_dir)
    if tag is None:
        return
    if not args.resume:
        hint = "add --resume, or choose another --save-dir"
        inputs.problems.append(f"{args.save_dir} holds the checkpoint {tag}: {hint}")
        return
    saved, stage = checkpoint.ranks_of(args.save_dir, tag), inputs.config.get("zero_optimization", {}).get("stage", 0)
    if ranks > saved or (stage and ranks < saved):  # DeepSpeed cuts no optimizer's state anew
        inputs.problems.append(f"{args.save_dir}/{tag} was saved by {saved} ranks, and this run has {ranks}")
