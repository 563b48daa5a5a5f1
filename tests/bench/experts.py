"""Measures how the arena serves mixtures of experts, with new tokens in each step: `python -m tests.bench.experts`.

| experts | what they are |
|---|---|
| `grouped` | Hugging Face's grouped matmuls: no size depends on the routing |
| `looped` | a loop over the experts that got tokens: sizes, and what is requested, depend on the routing |

| column | meaning |
|---|---|
| served | share of the bytes that the arena served, over the last half of the steps |
| plans | address plans made in all steps |
| live | MiB, the most bytes in use at once in a recorded step |
| arena | MiB reserved by the arena |
| beside | MiB of all requests that torch's allocator served in the step with the most of them |
| efficiency | live over arena and beside, as if the latter were in use all at once; "-" if served is less than 0.99 |
| native, expandable | live over what torch's CUDA allocator reserves, simulated over all recorded steps in turn |

The host is the CPU, so the arena is compared with a simulation of CUDA's allocator (tests/bench/caching_allocator.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import memplug
from memplug.arena.arena import Counters
from memplug.arena.plan.from_trace import last_step
from memplug.profile.trace import EventKind, Trace
from tests.bench.caching_allocator import reserved
from tests.bench.table import Row, figures, render, write_rows

BENCH = "experts"
MODELS = ("mixtral", "qwen3_moe")
EXPERTS = {"grouped": "grouped_mm", "looped": "eager"}
WAYS: dict[str, dict[str, Any]] = {
    "kept": {"enabled": False},
    "token-wise": {"enabled": True, "min_offload_bytes": 1024},
}
HEADERS = ("case", "served", "plans", "live", "arena", "beside", "efficiency", "native", "expandable")
UNITS = {"served": "1", "plans": "1", "efficiency": "1", "native": "1", "expandable": "1"}
MIB = 2**20
ENOUGH = 0.99  # served; below it, what torch's allocator reserves beside the arena is not known well enough


@dataclasses.dataclass(frozen=True)
class Case:
    """A training to measure: a model, how its experts run, and how many forwards come before the first backward."""

    model: str
    experts: str
    way: str
    micro_batches: int

    def __str__(self) -> str:
        return f"{self.model}, {self.experts}, {self.way}, {self.micro_batches} in flight"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line: which cases, and their sizes."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench.{BENCH}", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), help="[both]")
    add("--experts", nargs="+", choices=EXPERTS, default=list(EXPERTS), help="[both]")
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="[both]")
    add("--micro-batches", type=int, nargs="+", default=[1, 4], help="forwards before the first backward [1 4]")
    add("--layers", type=int, default=8, help="[8]")
    add("--hidden", type=int, default=128, help="hidden size [128]")
    add("--tokens", type=int, default=1024, help="of a micro-batch [1024]")
    add("--steps", type=int, default=100, help="[100]")
    add("--recorded", type=int, default=6, help="steps that are recorded at the end [6]")
    add("--json", type=Path, metavar="FILE", help="write the rows here")
    return parser.parse_args(argv)


def model_of(case: Case, args: argparse.Namespace) -> nn.Module:
    """Return the model of a case."""
    from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": args.hidden, "num_hidden_layers": args.layers, "vocab_size": 512, "use_cache": False}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    if case.model == "mixtral":
        config = MixtralConfig(intermediate_size=2 * args.hidden, num_local_experts=8, num_experts_per_tok=2, **sizes)
        model = MixtralForCausalLM(config)
    else:
        experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": args.hidden // 4}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(head_dim=args.hidden // 4, **experts, **sizes))
    model.set_experts_implementation(EXPERTS[case.experts])
    return model.train()


def measure(case: Case, args: argparse.Namespace) -> dict[str, float | None]:
    """Return the figures of a case."""
    model, tokens = model_of(case, args), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    block = {"enabled": True, "plan_dir": False, "profiler": {"wait_for_plans": True}, "tokenwise": WAYS[case.way]}
    steps: list[Counters] = []
    traces: list[Trace] = []
    with memplug.attach(model, block) as session:
        for number in range(args.steps + args.recorded):
            if number >= args.steps:
                session.record()
            ids = torch.randint(0, 512, (case.micro_batches, 1, args.tokens), generator=tokens)
            losses = [model(input_ids=each, labels=each).loss for each in ids]
            while losses:
                losses.pop(0).backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step()
            arena = session._attached.boundary.followers.find("arena")
            if arena is not None:
                steps.append(arena.step)
            if session.trace is not None and (not traces or session.trace is not traces[-1]):
                traces.append(session.trace)
        report = session.report().arena
    later = steps[len(steps) // 2 :]
    served = sum(step.planned_bytes + step.dynamic_bytes + step.reusable_bytes for step in later)
    left = [step.fallback_bytes for step in later]
    share = served / max(1, served + sum(left))
    requests = _requests([last_step(trace) for trace in traces])
    (native, live), (expandable, _) = (reserved(requests, expandable=how, times=1) for how in (False, True))
    return {
        "served": share,
        "plans": report.plans,
        "live_bytes": live,
        "arena_bytes": report.bytes,
        "beside_bytes": max(left),
        "efficiency": live / (report.bytes + max(left)) if share >= ENOUGH else None,
        "native": live / native,
        "expandable": live / expandable,
    }


def _requests(steps: list[Trace]) -> np.ndarray:
    """Return the requests of some steps, one after another, for the simulation. int64[k, 4].

    What a step leaves in use is freed as it ends.
    """
    rows, first = [], 0
    for step in steps:
        live: dict[int, int] = {}
        for kind, request, nbytes, stream in step.events[["kind", "request", "nbytes", "stream"]].tolist():
            if kind == EventKind.MALLOC and nbytes > 0:
                live[request] = stream
                rows.append((kind, first + request, nbytes, stream))
            elif kind == EventKind.FREE and request in live:
                rows.append((kind, first + request, 0, live.pop(request)))
        rows += [(int(EventKind.FREE), first + request, 0, stream) for request, stream in live.items()]
        first += len(step.requests)
    return np.array(rows, np.int64)


def main(argv: list[str] | None = None) -> None:
    """Measure every case and print the table."""
    args = parse_args(argv)
    torch.set_num_threads(1)
    rows, lines = [], []
    for of_case in itertools.product(args.models, args.experts, args.ways, args.micro_batches):
        case = Case(*of_case)
        found = measure(case, args)
        rows += [
            Row(BENCH, str(case), "arena", name, UNITS.get(name, "bytes"), value, args.steps)
            for name, value in found.items()
            if value is not None
        ]
        cells = [
            figures(value / MIB if value and name.endswith("_bytes") else value, 3) for name, value in found.items()
        ]
        lines.append([str(case), *cells])
        print(" ".join(lines[-1]), flush=True)
    print(render(HEADERS, lines, left=0))
    if args.json:
        write_rows(args.json, rows)


if __name__ == "__main__":
    main()
