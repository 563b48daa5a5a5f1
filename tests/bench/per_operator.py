"""Measures memplug's time for each operator: `python -m tests.bench.per_operator`.

A region has many operators on tensors of 4 x 4, so that a step is little but the host's work. The ways in the table
take turns, step by step, in one process with one thread, and processor time is measured. From the second forward on,
each forward is verified against the first one's tape. Nothing is captured: the recompute pass runs every operator that
a saved tensor depends on. Two regions are measured, one with twice as many operators, to separate the time of an
operator from the rest of a region's time.

| column | what it is |
|---|---|
| `alone` | time for each operator of a forward without memplug |
| `verified` | time for each operator of a forward with memplug |
| `again` | time for each operator of a forward without memplug and without gradients |
| `replay` | time for each operator that runs in a recompute pass |
| `added` | `verified` less `alone`; `by region`: the time that memplug adds to a region, besides its operators |
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from memplug.device.device import Device
from memplug.tokenwise.engine.executor import Executor
from memplug.tokenwise.engine.region import Region
from tests.bench.table import Row, figures, render, write_rows

BENCH = "per_operator"
PARTS = ("alone", "verified", "again", "replay")
HEADERS = ("operators", *(f"{part} µs" for part in (*PARTS, "added", "added by region")))
RUNS = 0  # `Action::RUN` of memplug/tokenwise/native/tape/rules.h: a recompute pass runs the operator

WEIGHTS = [torch.randn(4, 4, requires_grad=True) for _ in range(3)]
# Each kind saves one tensor for backward; the last kind has three operators.
KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mul": lambda x: x * WEIGHTS[0],
    "mm": lambda x: x.mm(WEIGHTS[1]),
    "mul, add, mm": lambda x: (x * WEIGHTS[0] + WEIGHTS[2]).mm(WEIGHTS[1]),
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line: how many operators, and for how long."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench.{BENCH}", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="[all]")
    add("--repeats", type=int, default=64, help="of each kind, in the smaller region [64]")
    add("--rounds", type=int, default=1000, help="turns of each way [1000]")
    add("--json", type=Path, metavar="FILE", help="write the rows here")
    return parser.parse_args(argv)


class Measured:
    """One region with a number of operators, and the seconds of each way to run it, by part."""

    def __init__(self, kind: str, repeats: int):
        def call(x: torch.Tensor) -> torch.Tensor:
            for _ in range(repeats):
                x = KINDS[kind](x)
            return x

        self.call = call
        self.seconds: dict[str, list[float]] = {part: [] for part in PARTS}
        self.executor, self.region = Executor(Device(), 1 << 20), Region("region", kind)
        self.x = torch.randn(4, 4, requires_grad=True) * 1.0
        self.frame, self.graph = self._observed()
        actions = self.frame.actions
        self.operators = {part: actions.count(RUNS) if part == "replay" else len(actions) for part in PARTS}

    def _observed(self) -> tuple[Any, torch.Tensor]:
        """Return the frame of a forward, and its output, whose graph gives the recompute pass tensors to restore."""
        frames: list[Any] = []
        self.executor.time_forwards(lambda region, frame, tape: frames.append(frame))
        out = self.executor.run(self.region, self.call, (self.x,), {})
        self.executor.time_forwards(None)
        return frames[0], out

    def take_turns(self) -> None:
        """Run each way once."""
        self._note("alone", lambda: self.call(self.x))
        self._note("verified", lambda: self.executor.run(self.region, self.call, (self.x,), {}))
        assert self.region.native.repeats, "it was verified against the tape"
        with torch.no_grad():
            self._note("again", lambda: self.call(self.x))
        self._note("replay", self.frame.replay)
        self.frame.forget()

    def _note(self, part: str, run: Callable[[], Any]) -> None:
        begin = time.process_time_ns()
        kept = run()
        self.seconds[part].append((time.process_time_ns() - begin) / 1e9)
        del kept  # frees the output's graph too, outside of both measurements


def measure(kind: str, repeats: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Return, by part, the seconds of an operator, and the seconds of a region besides its operators."""
    regions = [Measured(kind, repeats), Measured(kind, 2 * repeats)]
    for _ in range(rounds):
        for region in regions:
            region.take_turns()
    found = {}
    for part in PARTS:
        small, large = (statistics.median(region.seconds[part]) for region in regions)
        fewer, more = (region.operators[part] for region in regions)
        an_operator = (large - small) / (more - fewer)
        found[part] = (an_operator, small - fewer * an_operator)
    alone, verified = found["alone"], found["verified"]
    return {**found, "added": (verified[0] - alone[0], verified[1] - alone[1])}


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    args = parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows: list[Row] = []
    lines = []
    for kind in args.kinds:
        found = measure(kind, args.repeats, args.rounds)
        for part, (an_operator, besides) in found.items():
            rows.append(Row(BENCH, kind, part, "operator_s", "s", an_operator, args.rounds))
            rows.append(Row(BENCH, kind, part, "region_s", "s", besides, args.rounds))
        shown = [*(taken for taken, _ in found.values()), found["added"][1]]
        lines.append((kind, *(figures(taken * 1e6, 3) for taken in shown)))
    print(render(HEADERS, lines, left=0))
    if args.json:
        write_rows(args.json, rows)


if __name__ == "__main__":
    main()
