"""Watches the host memory of a long run: `python -m tests.bench.leaks`.

Trains a tiny model for 10,000 steps under a session that always watches and now and then records a step in detail. The
sequence length changes back and forth. Notes the memory of the process: memory that grows throughout is a leak; memory
that settles is the allocator's cache. Exits with 1 if memory grew over the second half of the run.

`--awkward` runs the steps of `tests.support.awkward` instead: errors in any pass, dropped and retained graphs, several
graphs in flight, passes without gradients, another length every few steps. Then the counts of objects must not grow at
all.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import memplug
from memplug.figures.figure import Axis, Column, Figure, Panel, Steps, bytes_axis
from memplug.show.picture import write_picture
from tests.bench.table import Row, render, write_rows
from tests.support.awkward import Fails, awkward_steps, left_behind
from tests.support.blocks import LAYERS, Block, Stack

BENCH = "leaks"
SAMPLES = 20
STEPS_BETWEEN_RECORDINGS = 250
STEPS_OF_A_LENGTH = 500
ALLOWED_BYTES_A_STEP = 100


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line: how long to run, and where to write."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench.{BENCH}", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000, help="[10000]")
    parser.add_argument("--alpha", default="auto", help="a number, or auto [auto]")
    parser.add_argument("--awkward", action="store_true", help="steps that go wrong, and unusual ones")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the curve here; needs kaleido and Chrome")
    return parser.parse_args(argv)


def resident_bytes() -> int:
    """Return the resident memory of this process, after a collection."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def run(steps: int, alpha: str = "auto", awkward: bool = False) -> tuple[list[tuple[int, int]], dict[str, int]]:
    """Train, and return the curve and, for awkward steps, the counts that grew.

    Returns:
        (step, resident bytes) at equal distances; and by how much counts grew over the second half.
    """
    torch.manual_seed(0)
    model = Stack(3, Fails if awkward else Block)
    curve, counts = [], []
    tokenwise = {"regions": LAYERS, "min_offload_bytes": 1, "alpha": alpha if alpha == "auto" else float(alpha)}
    with memplug.attach(model, {"enabled": True, "tokenwise": tokenwise}) as session:
        one_step = awkward_steps(model) if awkward else plain_steps(model)
        for step in range(1, steps + 1):
            next(one_step)
            if alpha == "auto" and step % STEPS_BETWEEN_RECORDINGS == 0:
                session.record()
            session.step()
            if step % (steps // SAMPLES) == 0:
                curve.append((step, resident_bytes()))
            if awkward and step in (steps // 2, steps):
                counts.append(left_behind(session._attached.executor))
        assert awkward or alpha != "auto" or (session.trace is not None and session.report().replans >= 1)
    grown = {what: counts[1][what] - count for what, count in counts[0].items()} if awkward else {}
    return curve, {what: count for what, count in grown.items() if count > 0}


def plain_steps(model: Stack) -> Iterator[None]:
    """Train one step at a time, without end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in itertools.count(1):
        length = 12 if step // STEPS_OF_A_LENGTH % 2 else 8
        model(torch.randn(2, length, 16)).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def growth_bytes_a_step(curve: list[tuple[int, int]]) -> float:
    """Return the slope of the curve's second half, by least squares."""
    half = curve[len(curve) // 2 :]
    steps, sizes = [step for step, _ in half], [nbytes for _, nbytes in half]
    mean_step, mean_size = sum(steps) / len(half), sum(sizes) / len(half)
    covariance = sum((step - mean_step) * (nbytes - mean_size) for step, nbytes in half)
    return covariance / sum((step - mean_step) ** 2 for step in steps)


def draw(curve: list[tuple[int, int]], file: Path) -> None:
    """Write the curve as a picture."""
    steps, sizes = np.array(curve).T
    line = Steps(steps, sizes, "resident", [f"step {step:,}" for step in steps])
    panel = Panel(y=bytes_axis("resident memory", int(sizes.max()), 1.05), height=1, content=[line])
    column = Column(x=Axis(title="step", low=0, high=float(steps[-1]), grid=True), panels=[panel])
    write_picture(Figure(title="memory of the process over a long run", columns=[column]), file)


def main(argv: list[str] | None = None) -> int:
    """Run and print; return 1 if memory grew."""
    args = parse_args(argv)
    torch.set_num_threads(1)
    curve, grown = run(args.steps, args.alpha, args.awkward)
    print(render(("step", "resident MiB"), [[str(step), f"{nbytes / 2**20:.2f}"] for step, nbytes in curve]))
    growth = growth_bytes_a_step(curve)
    print(f"\ngrowth over the second half: {growth:.1f} bytes a step")
    if args.awkward:
        print(f"counts that grew: {grown or 'none'}")
    case = f"{args.steps} steps"
    rows = [Row(BENCH, f"step {step}", "memplug", "resident_bytes", "bytes", nbytes, 1) for step, nbytes in curve]
    rows.append(Row(BENCH, case, "memplug", "growth_bytes_a_step", "bytes", growth, len(curve) // 2))
    if args.json:
        write_rows(args.json, rows)
    if args.png:
        draw(curve, args.png)
    return int(growth > ALLOWED_BYTES_A_STEP or bool(grown))


if __name__ == "__main__":
    logging.getLogger("memplug").setLevel(logging.ERROR)
    sys.exit(main())
