"""Measures whether a training step waits for a planner: the longest step after warm-up over the median of its kind.

A Llama of many small layers requests memory some 140 times a layer: 36 layers make a program of 5,000 requests, 360
layers one of 50,000. A step is compared with the steps of its kind: steps at the safest setting, before there are
decisions; steps that run by decisions, while another process finds addresses; and steps that the arena serves. Each
kind includes the steps during which a plan is made, and the step at whose end it comes into force. Recorded steps are
slower by the cost of recording, and are shown separately, over the median of the steps that the arena serves.

The longest step of one run may be noise of the machine. A wait for a planner occurs in every run, noise does not. So
each figure is the least of several runs.

Run it on an idle machine: `python -m tests.bench.longest_step [--layers 36 360] [--runs 3] [--waits] [--json FILE]`
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import memplug
from memplug.arena.technique import ArenaState
from memplug.beside import Beside
from memplug.session.table import Stage
from tests import made_as_users_do
from tests.bench.table import Row, figures, render, write_rows

BENCH = "longest_step"
KINDS = ("safest", "decided", "served", "recorded")
HEADERS = [
    "program",
    "plans are made",
    "median served step s",
    "longest at the safest setting over their median (steps)",
    "longest decided over their median (steps)",
    "longest served over their median (steps)",
    "longest recorded over served (steps)",
]
LAYERS = (36, 360)
RUNS = 3
SETTLED_STEPS = 12  # steps that the arena serves before a run ends


@dataclass
class Step:
    """A step of a run: its seconds, from the end of the step before, and the states that it ran in."""

    seconds: float
    recorded: bool
    stage: Stage
    state: ArenaState | None

    @property
    def kind(self) -> str:
        """Return one of `KINDS`, or "warm-up"."""
        if self.recorded or self.stage is not Stage.STABLE:
            return "recorded" if self.recorded else "warm-up" if self.stage is Stage.WARM_UP else "safest"
        return "served" if self.state is ArenaState.SERVING else "decided"


def llama(layers: int) -> torch.nn.Module:
    """Return a model of small layers, so that the host's time is most of a step."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=layers, **sizes))


def run(layers: int, waits: bool) -> tuple[list[Step], int]:
    """Train until the arena has served for a while; return the steps, and the number of requests of the program."""
    torch.manual_seed(0)
    network = llama(layers)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    ids = torch.randint(0, 64, (2, 64))
    block = {
        "enabled": True,
        "plan_dir": False,
        "tokenwise": {"min_offload_bytes": 1},
        "profiler": {"wait_for_plans": waits},
    }
    steps: list[Step] = []
    with memplug.attach(network, block) as session:
        served, before = 0, time.perf_counter()
        recorded = 0
        while served < SETTLED_STEPS:
            network(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            stage, serving = session.stage, session._attached.boundary.followers.find("arena")
            state = serving.state if serving is not None else None
            session.step()
            now = time.perf_counter()
            count = session.report().recorded_steps
            steps.append(Step(now - before, count > recorded, stage, state))
            before, recorded = time.perf_counter(), count
            served += state is ArenaState.SERVING
        serving = session._attached.boundary.followers.find("arena")
        assert serving is not None and serving.plan is not None
        return steps, len(serving.plan.problem)


def measure(layers: int, waits: bool, runs: int) -> list[Row]:
    """Return rows of one program; each maximum is the least over `runs` runs."""
    medians, longest, counts = [], [], []
    for _ in range(runs):
        steps, requests = run(layers, waits)
        seconds = {kind: [step.seconds for step in steps[1:] if step.kind == kind] for kind in KINDS}
        typical = {kind: statistics.median(seconds[kind]) for kind in KINDS if seconds[kind]}
        typical["recorded"] = typical["served"]
        longest.append({kind: max(seconds[kind]) / typical[kind] for kind in KINDS if seconds[kind]})
        counts.append({kind: len(seconds[kind]) for kind in KINDS})
        medians.append(typical["served"])
    case, mode = f"{requests:,} requests", "training waits" if waits else "beside training"
    rows = [Row(BENCH, case, mode, "median_s", "s", statistics.median(medians), sum(each["served"] for each in counts))]
    for kind in KINDS:
        least = min((each[kind] for each in longest if kind in each), default=None)
        count = sum(each[kind] for each in counts)
        rows.append(Row(BENCH, case, mode, f"longest_{kind}_over_median", "1", least, count))
    return rows


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line: which programs, and where to write."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench.{BENCH}", description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS, help=f"of each program {list(LAYERS)}")
    parser.add_argument("--runs", type=int, default=RUNS, help=f"runs; the least figure counts [{RUNS}]")
    parser.add_argument("--waits", action="store_true", help="measure also while training waits for each plan")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    return parser.parse_args(argv)


def main() -> None:
    """Measure and print."""
    args = parse_args()
    Beside.__init__ = made_as_users_do
    torch.set_num_threads(1)
    rows: list[Row] = []
    for layers in args.layers:
        for waits in (False, True) if args.waits else (False,):
            rows += measure(layers, waits, args.runs)
            median, *longest = rows[-1 - len(KINDS) :]
            values = [median.case, median.mode, f"{median.value:.3f}"]
            values += [f"{figures(row.value, 3)} ({row.n})" for row in longest]
            print(render(HEADERS, [values], left=2), flush=True)
    if args.json:
        write_rows(args.json, rows)


if __name__ == "__main__":
    main()
