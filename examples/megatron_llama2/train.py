"""Trains a Llama, a Mixtral or a Qwen3 of Megatron-Core on text with memplug.

Start it with a launcher, for example `torchrun --nproc-per-node 2 examples/megatron_llama2/train.py --tensor 2`;
README.md says more.
"""

import argparse
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "examples/llama2"))  # shares text, checks and report with that recipe
ON_CPU = not torch.cuda.is_available()
if ON_CPU:
    import cpu

    cpu.pretend()

import model as megatron_model  # noqa: E402
from checks import Inputs, Ranks, agree, describe, make_batches  # noqa: E402
from data import Batches  # noqa: E402
from layout import parse_args, read  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from report import model_flop_per_token, peak_flop_per_s, peak_memory_gib, render, write_log  # noqa: E402
from tqdm import tqdm  # noqa: E402
from tqdm.contrib.logging import logging_redirect_tqdm  # noqa: E402

log = logging.getLogger("megatron_llama2")
WARM_UP_STEPS = 10


def start(args: argparse.Namespace) -> Inputs:
    """Join the other ranks, and return the inputs of the run once all ranks have checked them."""
    if ON_CPU:
        dist.init_process_group("gloo")
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    level = logging.INFO if dist.get_rank() == 0 else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(name)s: %(message)s")
    # Megatron-Core calls collectives by names that newer torch deprecates, at every step
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    inputs = read(args, Ranks.of(args))
    agree(inputs, args, log)  # nothing has been built yet
    return inputs


def load_data(args: argparse.Namespace, tokens: torch.Tensor) -> tuple[Batches, Batches]:
    """Return this rank's batches to train on and to validate with.

    Each sequence has one token more than --seq-len, for the last token's label.
    """
    return make_batches(
        tokens,
        seq_len=args.seq_len + 1,
        micro_batch=args.micro_batch,
        rank=parallel_state.get_data_parallel_rank(),
        world_size=parallel_state.get_data_parallel_world_size(),
        seed=args.seed,
    )


def micro_batches(batches: Batches, first: int) -> Iterator[torch.Tensor]:
    """Yield micro-batches on the device, from number `first` on, without end."""
    index = first
    while True:
        yield batches[index].to(torch.cuda.current_device())
        index += 1


def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of this rank's tokens, as Megatron-Core's schedules expect it.

    Args:
        output: loss of each token.

    Returns:
        The rank's share of the mean loss over all ranks that share the sequences; and for the log, the mean loss of
            its own tokens.
    """
    loss = output.float().mean()
    return loss / parallel_state.get_context_parallel_world_size(), {"loss": loss.detach().clone()}


def forward_step(batches: Iterator[torch.Tensor], chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Run one micro-batch through one chunk, as Megatron-Core's schedules expect it."""
    tokens = next(batches)
    positions = torch.arange(tokens.shape[1] - 1, device=tokens.device).expand(tokens.shape[0], -1)
    whole = {"tokens": tokens[:, :-1], "positions": positions, "labels": tokens[:, 1:]}
    part = megatron_model.share_of(whole)
    return chunk(part["tokens"], part["positions"], None, labels=part["labels"]), loss_of


def run_batches(args: argparse.Namespace, chunks: list[Any], batches: Batches, indices: range, train: bool) -> float:
    """Run micro-batches through all stages, and return their mean loss over all ranks."""
    many = len(chunks) > 1
    iterators = [micro_batches(batches, indices.start) for _ in chunks]
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if many else iterators[0],
        model=chunks if many else chunks[0],
        num_microbatches=len(indices),
        seq_length=args.seq_len,
        micro_batch_size=args.micro_batch,
        forward_only=not train,
    )
    total = torch.zeros(2, device=torch.cuda.current_device())
    for one in losses:  # only the last stage has any
        total += torch.stack([one["loss"], torch.ones_like(one["loss"])])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def validate(args: argparse.Namespace, chunks: list[Any], batches: Batches) -> float:
    """Return the mean loss over the validation micro-batches."""
    with torch.no_grad():
        for chunk in chunks:
            chunk.eval()
        loss = run_batches(args, chunks, batches, range(args.eval_batches), train=False)
        for chunk in chunks:
            chunk.train()
    return loss


def train(
    args: argparse.Namespace, chunks: list[Any], optimizer: Any, batches: Batches, session: Any
) -> tuple[list[float], list[float]]:
    """Train for --steps, and return the loss and the seconds of each step."""
    losses, step_s = [], []
    watched = dist.get_rank() == 0 and sys.stderr.isatty()
    with logging_redirect_tqdm(), tqdm(total=args.steps, unit="step", disable=not watched) as bar:
        for step in range(1, args.steps + 1):
            started = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = args.learning_rate * min(1.0, step / WARM_UP_STEPS)
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            indices = range((step - 1) * args.micro_batches, step * args.micro_batches)
            losses.append(run_batches(args, chunks, batches, indices, train=True))
            _, gradient_norm, _ = optimizer.step()
            if session is not None:
                session.step()
            step_s.append(time.perf_counter() - started)
            write_log(args.loss_log, {"step": step, "loss": losses[-1], "gradient_norm": gradient_norm})
            bar.set_postfix(loss=f"{losses[-1]:.4f}", refresh=False)
            bar.update()
            if bar.disable and (step % max(1, args.steps // 10) == 0 or step in (1, args.steps)):
                log.info("step %d of %d, loss %.4f", step, args.steps, losses[-1])
    return losses, step_s


def count_parameters(chunks: list[Any]) -> float:
    """Return this rank's part of the number of parameters; a parameter that n ranks have counts as 1 / n on each."""
    total = 0.0
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        if not getattr(parameter, "allreduce", True):  # the parameter of an expert
            copies = parallel_state.get_expert_data_parallel_world_size()
        else:
            split = getattr(parameter, "tensor_model_parallel", False)
            ranks = 1 if split else parallel_state.get_tensor_model_parallel_world_size()
            copies = parallel_state.get_data_parallel_world_size(with_context_parallel=True) * ranks
        total += parameter.numel() / copies
    return total


def make_report(
    args: argparse.Namespace, shape: dict[str, Any], chunks: list[Any], losses: list[float], step_s: list[float]
) -> dict[str, Any]:
    """Return the numbers of a run, ready for JSON; all ranks call it."""
    device = torch.device(torch.cuda.current_device())
    memory_gib = peak_memory_gib(device)  # before the matmul, which is not part of training
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    own = torch.tensor(count_parameters(chunks), dtype=torch.float64, device=device)
    dist.all_reduce(own)
    parameters = round(own.item())
    flop_per_token = model_flop_per_token(argparse.Namespace(**shape), parameters, args.seq_len)
    peak, source = peak_flop_per_s(device, dtype)
    data_parallel = parallel_state.get_data_parallel_world_size()
    tokens = args.micro_batch * args.micro_batches * data_parallel * args.seq_len
    tokens_per_s = tokens / statistics.median(step_s)
    return {
        "parameters": parameters,
        "ranks": dist.get_world_size(),
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "split": f"tensor {args.tensor}, pipeline {args.pipeline}, context {args.context}, expert {args.expert}, "
        f"data {data_parallel}",
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "step_s": statistics.median(step_s),
        "tokens_per_s": tokens_per_s,
        "mfu": tokens_per_s * flop_per_token / dist.get_world_size() / peak,
        "peak_flop_per_s": peak,
        "peak_source": source,
        "memory_gib": memory_gib,
    }


def main() -> None:
    """Check the inputs, or train and report."""
    args = parse_args()
    if args.check is not None:
        text, fine = describe(read(args, Ranks.of(args)), args)
        sys.stdout.write(text if os.environ.get("LOCAL_RANK", "0") == "0" else "")
        raise SystemExit(0 if fine else 1)
    inputs = start(args)
    shape = inputs.shape
    parallel = megatron_model.Parallel(
        tensor=args.tensor,
        sequence=args.sequence,
        pipeline=args.pipeline,
        chunks=args.chunks,
        context=args.context,
        expert=args.expert,
        dispatcher=args.dispatcher,
    )
    megatron_model.initialize(parallel, args.seed)
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    eight_bits = {"fp8": "hybrid", "fp8_recipe": "delayed"} if args.fp8 else {}
    config = megatron_model.transformer_config(shape, parallel, dtype, **eight_bits)
    chunks = megatron_model.build_chunks(config, shape, args.seq_len, args.distributed_optimizer, args.attention)
    optimizer = megatron_model.build_optimizer(chunks, dtype, args.learning_rate, args.distributed_optimizer)
    session = None
    if args.memplug:
        import memplug  # only here: with --no-memplug this is a plain Megatron-Core script

        session = memplug.attach(chunks, args.memplug_config)
    train_set, validation_set = load_data(args, inputs.tokens)
    losses, step_s = train(args, chunks, optimizer, train_set, session)
    report = make_report(args, shape, chunks, losses, step_s)
    report["validation_loss"] = validate(args, chunks, validation_set)
    report["memplug"] = session.report().as_dict() if session else None
    write_log(args.loss_log, {"report": report})
    if dist.get_rank() == 0:
        sys.stdout.write(render(report))
    if session is not None:
        session.detach()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
