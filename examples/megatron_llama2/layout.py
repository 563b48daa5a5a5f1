"""The command line of the Megatron-Core recipe: how it splits a model, checked before the model is built.

It also estimates the memory of a rank. It imports nothing of Megatron-Core's.
"""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import checks
import torch
from checks import Inputs, Ranks
from memory import Estimate, count, logits_bytes

ROOT = Path(__file__).resolve().parents[2]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Trains a Llama, a Mixtral or a Qwen3 of Megatron-Core on text with memplug.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    on_gpu, add = torch.cuda.is_available(), parser.add_argument
    add("--model", type=Path, default=ROOT / "configs/models/tiny.yaml", help="shape of the model, as YAML")
    add("--tensor", type=int, default=1, help="ranks that share each matmul")
    add("--sequence", action="store_true", help="the same ranks share the rest of a layer, by tokens")
    add("--pipeline", type=int, default=1, help="pipeline stages")
    add("--chunks", type=int, default=1, help="chunks of layers per stage; above 1: the interleaved schedule")
    add("--context", type=int, default=1, metavar="N", help="ranks that share each sequence; needs --attention te")
    add("--expert", type=int, default=1, help="ranks that share the experts of a mixture")
    add("--dispatcher", choices=("alltoall", "allgather"), default="alltoall", help="how tokens reach experts")
    add("--distributed-optimizer", action="store_true", help="data-parallel ranks share the optimizer's state")
    add(
        "--attention",
        choices=("sdpa", "flash", "te"),
        default="sdpa",
        help="torch's, or flash-attn's (bf16, GPU), or all modules of a layer from Transformer Engine",
    )
    add("--fp8", action="store_true", help="matmuls of layers in 8 bits, scaled by earlier steps; needs --attention te")
    add(
        "--bf16",
        action=argparse.BooleanOptionalAction,
        help="weights and activations in bfloat16; if not given: on GPUs",
    )
    add("--micro-batch", type=int, default=4, help="sequences of a micro-batch")
    add("--micro-batches", type=int, default=2, help="micro-batches of a step on each data-parallel rank")
    add("--steps", type=int, default=40, help="optimizer steps")
    add("--seq-len", type=int, default=256, help="tokens of a sequence")
    add("--learning-rate", type=float, default=3e-4 if on_gpu else 3e-3, help="rate after warm-up")
    checks.add_arguments(parser)
    add("--eval-batches", type=int, default=2, help="micro-batches of the validation at the end")
    add("--seed", type=int, default=0, help="seed of the weights and of the order of the data")
    add("--memplug-config", type=Path, default=ROOT / "configs/ds_tiny.json", help='JSON with the "memplug" block')
    add("--memplug", action=argparse.BooleanOptionalAction, default=True, help="train with memplug")
    args = parser.parse_args(argv)
    if args.check is None and "RANK" not in os.environ:
        parser.error("start me with torchrun, or with a script in launch/; or give --check")
    if args.bf16 is None:
        args.bf16 = on_gpu or (args.check is not None and args.gpu_gib is not None)
    return args


def read(args: argparse.Namespace, ranks: Ranks) -> Inputs:
    """Read all inputs of a run of `ranks`.

    Nothing is raised: `problems` of the result has all problems.
    """
    inputs = Inputs()
    counts = ("tensor", "pipeline", "chunks", "context", "expert", "micro_batch", "micro_batches", "steps", "seq_len")
    checks.positive(inputs, args, *counts, "eval_batches")
    checks.read_shape(inputs, args.model)
    checks.check_attention(inputs, args, args.bf16, "add --bf16")
    checks.check_loss_log(inputs, args)
    if args.memplug:
        checks.read_memplug(inputs, args.memplug_config)
    if inputs.problems:
        return inputs  # further checks would only repeat them
    _check_split(inputs, args, ranks.count)
    if inputs.problems:
        return inputs
    data_parallel = ranks.count // (args.tensor * args.pipeline * args.context)
    checks.read_text(inputs, args, (args.seq_len + 1) * args.micro_batch * data_parallel)
    inputs.estimate = estimate(args, inputs.shape, ranks.count)
    return inputs


def _check_split(inputs: Inputs, args: argparse.Namespace, ranks: int) -> None:
    """Add a problem for each setting that Megatron-Core would refuse, in the order in which it would."""
    shape, experts = inputs.shape, inputs.shape.get("num_local_experts", 0)
    sharing = args.tensor * args.pipeline * args.context
    checks.divides(inputs, sharing, ranks, "--tensor × --pipeline × --context", "the number of ranks")
    for name in ("num_attention_heads", "num_key_value_heads", "vocab_size", "intermediate_size"):
        checks.divides(inputs, args.tensor, shape[name], "--tensor", f"the model's {name}")
    checks.divides(
        inputs, args.pipeline * args.chunks, shape["num_hidden_layers"], "--pipeline × --chunks", "the number of layers"
    )
    if args.sequence:
        tokens = args.seq_len // args.context
        checks.divides(inputs, args.tensor, tokens, "--tensor, with --sequence,", "--seq-len / --context")
    if args.context > 1:
        checks.divides(inputs, 2 * args.context, args.seq_len, "2 × --context", "--seq-len")
    for option, asked in (("--context of 2 or more", args.context > 1), ("--fp8", args.fp8)):
        if asked and args.attention != "te":
            inputs.problems.append(f"{option} needs --attention te")
    if args.fp8:
        _check_eight_bits(inputs, args)
    if args.chunks > 1 and args.pipeline == 1:
        inputs.problems.append("--chunks needs --pipeline of 2 or more")
    if args.chunks > 1:
        checks.divides(inputs, args.pipeline, args.micro_batches, "--pipeline, with --chunks,", "--micro-batches")
        checks.divides(inputs, args.pipeline, args.eval_batches, "--pipeline, with --chunks,", "--eval-batches")
    if args.expert > 1:
        if not experts:
            inputs.problems.append(f"--expert is {args.expert}, and the model has no experts")
        else:
            checks.divides(inputs, args.expert, experts, "--expert", "the number of experts")
        checks.divides(inputs, args.expert * args.pipeline, ranks, "--expert × --pipeline", "the number of ranks")
    if experts and args.tensor > 1 and not args.sequence:
        inputs.problems.append("a mixture with --tensor of 2 or more needs --sequence")


def _check_eight_bits(inputs: Inputs, args: argparse.Namespace) -> None:
    """Add a problem for each matrix that Transformer Engine cannot multiply in 8 bits.

    Transformer Engine needs rows in multiples of 8, and columns in multiples of 16.
    """
    shape = inputs.shape
    tokens = args.micro_batch * args.seq_len // args.context // (args.tensor if args.sequence else 1)
    checks.divides(inputs, 8, tokens, "with --fp8, 8", "a rank's tokens")
    heads, groups = shape["num_attention_heads"], shape["num_key_value_heads"]
    size = shape.get("head_dim") or shape["hidden_size"] // heads
    widths = {
        "hidden_size": shape["hidden_size"],
        "a rank's part of the intermediate_size": shape["intermediate_size"] // args.tensor,
        "a rank's part of all heads": heads * size // args.tensor,
        "a rank's part of queries, keys and values": (heads + 2 * groups) * size // args.tensor,
    }
    for name, width in widths.items():
        checks.divides(inputs, 16, width, "with --fp8, 16", name)


def parameters_of_rank(args: argparse.Namespace, shape: Mapping[str, Any], stage: int) -> tuple[int, int]:
    """Return how many parameters each rank of a pipeline stage has: of experts, and of everything else."""
    whole, experts = count(shape), shape.get("num_local_experts", 0)
    layers = whole.layers // args.pipeline
    # with expert parallelism, tensor parallelism does not split experts (see model.py)
    share = (args.expert if args.expert > 1 else args.tensor) if experts else args.tensor
    feed_forward = layers * whole.feed_forward // share
    rest = layers * (whole.attention // args.tensor + whole.head_norms + whole.router + 2 * whole.norm)
    if stage == 0:
        rest += whole.embedding // args.tensor
    if stage == args.pipeline - 1:
        rest += (whole.head or whole.embedding) // args.tensor + whole.norm
    return (feed_forward, rest) if experts else (0, feed_forward + rest)


def state_bytes(args: argparse.Namespace, copies: int) -> float:
    """Return the bytes per parameter of weights, float32 gradients and the optimizer's state.

    With the distributed optimizer, the ranks that have one of the `copies` of a parameter share the optimizer's state.
    In bfloat16 the result is 18 bytes, or with the distributed optimizer 6 + 12 / copies.
    """
    weights, optimizer = (2, 12) if args.bf16 else (4, 8)  # in float32 the weights are the optimizer's own
    return weights + 4 + optimizer / (copies if args.distributed_optimizer else 1)


def estimate(args: argparse.Namespace, shape: Mapping[str, Any], ranks: int) -> Estimate:
    """Estimate the memory of the rank that needs most, by Megatron's arithmetic.

    Ranks that share a sequence have the same weights, and share the optimizer's state with their data-parallel ranks.
    """
    copies = ranks // (args.tensor * args.pipeline)
    expert_data_parallel = ranks // ((args.expert if args.expert > 1 else args.tensor) * args.pipeline)
    stages = {}
    for stage in range(args.pipeline):
        experts, rest = parameters_of_rank(args, shape, stage)
        states = experts * state_bytes(args, expert_data_parallel) + rest * state_bytes(args, copies)
        stages[stage] = round(states), experts, rest
    states, experts, rest = max(stages.values())
    logits = logits_bytes(shape["vocab_size"], args.seq_len // args.context * args.micro_batch) // args.tensor
    context = f"context {args.context}, " if args.context > 1 else ""
    split = f"tensor {args.tensor}, pipeline {args.pipeline}, {context}data {copies // args.context}"
    notes = {"model": f"{count(shape).total:,} parameters", "on": f"{ranks} rank{'s' if ranks > 1 else ''}, {split}"}
    notes["of them on a rank"] = f"{experts + rest:,}"
    if experts:
        notes["on"] += f", expert {args.expert}, expert data {expert_data_parallel}"
        notes["of them on a rank"] += f", {experts:,} of experts"
    return Estimate(source="Megatron's arithmetic", states_bytes=states, logits_bytes=logits, notes=notes)
