"""Measures trainings whose inputs change in size from step to step: `python -m tests.bench.lengths`.

The model is Hugging Face's Llama (6 layers, hidden size 128) or Mixtral (4 layers, hidden size 64), trained on the CPU.

| lengths | what they are |
|---|---|
| `uniform` | 64 to 768 tokens, each as likely |
| `buckets` | 128, 256, 512 or 768 tokens, in random order |
| `log-normal` | as in fine-tuning: half of the sequences below 200 tokens, 16 to 768 |
| `micro-batches` | four forwards in turn, each of 64 to 768 tokens |
| `two sizes` | 1 to 4 sequences of 32 to 192 tokens |
| `mixtral` | `uniform`, for Mixtral |

| way | what it is |
|---|---|
| `kept` | the arena alone |
| `token-wise` | the block's defaults; layers swap and recompute by rows, as memplug chooses |

| column | meaning |
|---|---|
| served, worst | share of a step's bytes that the arena served: the mean of the last half of the steps, and the least |
| plans | decisions that were made, and address plans |
| safest | steps that ran at the safest setting, or without decisions |
| longest | MiB, the most bytes in use at once in the longest recorded step |
| arena | MiB reserved by the arena |
| beside | MiB, the most that torch's allocator had in use in a step of the last half, beyond what stays in use |
| over | the most of arena and beside in one such step, over the longest step's peak |
| native, expandable | what torch's CUDA allocator reserves over that peak, simulated over the recorded steps in turn |
| CPU time | of the last half's steps over those of keeping everything with torch's allocator, in the sum |

Token-wise steps keep less than the longest one does without memplug, so "longest" differs between the ways. Kept and
token-wise steps are compared with torch's allocator for the same requests.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memplug
from memplug.arena.plan.from_trace import last_step
from memplug.profile.trace import Trace
from memplug.session.table import Stage
from tests.bench.caching_allocator import reserved
from tests.bench.experts_worker import requests_of
from tests.bench.table import Measured, tabulate
from tests.support.beside_arena import BesideArena

BENCH = "lengths"
LONGEST, SHORTEST = 768, 64
Shapes = list[tuple[int, int]]
"""(sequences, tokens) of each micro-batch of a step."""

DRAWS: dict[str, Callable[[random.Random], Shapes]] = {
    "uniform": lambda draw: [(1, draw.randint(SHORTEST, LONGEST))],
    "buckets": lambda draw: [(1, draw.choice([128, 256, 512, LONGEST]))],
    "log-normal": lambda draw: [(1, min(LONGEST, max(16, int(draw.lognormvariate(5.3, 0.6)))))],
    "micro-batches": lambda draw: [(1, draw.randint(SHORTEST, LONGEST)) for _ in range(4)],
    "two sizes": lambda draw: [(draw.randint(1, 4), draw.randint(32, LONGEST // 4))],
    "mixtral": lambda draw: [(1, draw.randint(SHORTEST, LONGEST))],
}
WAYS: dict[str, dict[str, Any]] = {"kept": {"enabled": False}, "token-wise": {"min_offload_bytes": 1024}}
HEADERS = {
    "served": "served",
    "worst": "worst",
    "decisions": "decisions",
    "plans": "plans",
    "safest": "safest",
    "longest_bytes": "longest",
    "arena_bytes": "arena",
    "beside_bytes": "beside",
    "over": "over",
    "native": "native",
    "expandable": "expandable",
    "cpu_time": "CPU time",
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line: which trainings, and how long."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench.{BENCH}", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--lengths", nargs="+", choices=DRAWS, default=list(DRAWS), help="[all]")
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="[both]")
    add("--steps", type=int, default=240, help="[240]")
    add("--recorded", type=int, default=12, help="steps that are recorded at the end [12]")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="FILE", help="write the rows here")
    return parser.parse_args(argv)


def model_of(lengths: str) -> nn.Module:
    """Return the model of a case, the same each time."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1000}
    if lengths == "mixtral":
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
        return MixtralForCausalLM(MixtralConfig(**heads, **sizes))
    return LlamaForCausalLM(LlamaConfig(hidden_size=128, intermediate_size=352, num_hidden_layers=6, **heads))


def train(model: nn.Module, lengths: str, steps: int, seed: int) -> Iterator[float]:
    """Train, and yield the CPU time of each step, which the caller ends for the session, if there is one.

    The last step has the inputs of the largest one before it.
    """
    draw, tokens = random.Random(seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    drawn = [DRAWS[lengths](draw) for _ in range(steps - 1)]
    drawn.append(max(drawn, key=lambda shapes: max(sequences * tokens for sequences, tokens in shapes)))
    for shapes in drawn:
        begin = time.process_time()
        for shape in shapes:
            ids = torch.randint(0, 1000, shape, generator=tokens)
            model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield time.process_time() - begin


def measure(lengths: str, way: str, args: argparse.Namespace) -> dict[str, float | None]:
    """Return the figures of a training."""
    model, half, steps = model_of(lengths), args.steps // 2, args.steps + args.recorded
    counts: list[tuple[int, int]] = []  # bytes served by the arena, and by torch's allocator
    held: list[tuple[int, int]] = []  # bytes of the arena, and the most of torch's allocator
    traces: list[Trace] = []
    seconds: list[float] = []
    safest = 0
    block = {"enabled": True, "plan_dir": False, "tokenwise": WAYS[way], "profiler": {"wait_for_plans": True}}
    with BesideArena() as beside, memplug.attach(model, block) as session:
        boundary = session._attached.boundary
        for number, own_s in enumerate(train(model, lengths, steps, args.seed)):
            begin = time.process_time()
            under = boundary.adjuster.taken.under
            safest += way != "kept" and (under is None or under.stage is Stage.WARM_UP)
            arena = boundary.followers.find("arena")
            held.append((arena.counters.reserved_bytes if arena is not None else 0, beside.peak_bytes()))
            if number >= args.steps - 1:
                session.record()
            session.step()
            seconds.append(own_s + time.process_time() - begin)
            step = arena.step if arena is not None else None
            if step is not None:
                counts.append((step.planned_bytes + step.dynamic_bytes + step.reusable_bytes, step.fallback_bytes))
            if number >= args.steps and session.trace is not None:
                traces.append(session.trace)
        report = session.report()
    plain = [*train(model_of(lengths), lengths, steps, args.seed)]
    last_half = slice(-(args.steps - half) - args.recorded, -args.recorded)
    later, memory = counts[last_half], held[last_half]
    shares = [own / max(1, own + other) for own, other in later]  # nothing is counted while there is no plan: 0
    requests = [requests_of([last_step(trace)]) for trace in traces]
    longest = max(reserved(one, times=1)[1] for one in requests)
    in_turn = requests_of([last_step(trace) for trace in traces])
    native, expandable = (reserved(in_turn, expandable=how, times=1)[0] for how in (False, True))
    return {
        "served": statistics.fmean(shares),
        "worst": min(shares),
        "decisions": report.replans,
        "plans": report.arena.plans,
        "safest": safest,
        "longest_bytes": longest,
        "arena_bytes": report.arena.bytes,
        "beside_bytes": max(other for _, other in memory),
        "over": max(map(sum, memory)) / longest,
        "native": native / longest,
        "expandable": expandable / longest,
        "cpu_time": sum(seconds[half : args.steps]) / sum(plain[half : args.steps]),
    }


def main(argv: list[str] | None = None) -> None:
    """Measure every case and print the table."""
    args = parse_args(argv)
    torch.set_num_threads(1)
    cases = ((lengths, way) for lengths in args.lengths for way in args.ways)
    measured = (Measured(", ".join(case), measure(*case, args), args.steps) for case in cases)
    tabulate(BENCH, "arena", HEADERS, measured, args.json)


if __name__ == "__main__":
    main()
