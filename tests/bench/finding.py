"""Measures the cost of finding the tensors of a swap list: `python -m tests.bench.finding` (Chameleon, appendix A).

The swap list has a target for every gap between two uses of a tensor in a training step. The native core runs through
that step, without tensors, and looks for the targets. The time to pass the step from Python is left out. Figures are
medians.

| column | what it is |
|---|---|
| targets | number of targets of the list |
| uses | number of uses of tensors by operators in the step |
| ns | nanoseconds of the native core for each use |
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from tests.bench.table import Row, figures, render, write_rows
from tests.support.rehearsals import flat, listed, rehearsal

BENCH = "finding"
MODELS = ("llama", "vit", "t5", "convolutions")
UNITS = {"targets": "1", "uses": "1", "ns": "ns"}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line: which models, and how long to measure."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench.{BENCH}", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), help="[all]")
    add("--times", type=int, default=50, help="runs of a step for one figure [50]")
    add("--rounds", type=int, default=9, help="figures; the median counts [9]")
    add("--json", type=Path, metavar="FILE", help="write the rows there")
    return parser.parse_args(argv)


def measure(kind: str, times: int, rounds: int) -> dict[str, Any]:
    """Return the figures of one model; `times` must be above 1."""
    _, tensors, groups = listed(kind)
    step, rehearsed = flat(groups), rehearsal(kind)
    uses = sum(len(inputs) + len(outputs) for _, _, inputs, outputs in step)

    def seconds(repeats: int) -> float:
        begin = time.perf_counter()
        found = rehearsed.run(step, repeats)
        assert found == list(tensors)
        return time.perf_counter() - begin

    each_s = [(seconds(times) - seconds(1)) / (times - 1) for _ in range(rounds)]
    return {"targets": len(tensors), "uses": uses, "ns": statistics.median(each_s) / uses * 1e9}


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    args = parse_args(argv)
    rows, lines = [], []
    for kind in args.models:
        found = measure(kind, args.times, args.rounds)
        lines.append([kind, *(figures(value) for value in found.values())])
        rows += [Row(BENCH, kind, "found", name, UNITS[name], value, args.rounds) for name, value in found.items()]
    print(render(["model", *UNITS], lines, left=0))
    if args.json:
        write_rows(args.json, rows)


if __name__ == "__main__":
    main()
