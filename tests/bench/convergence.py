"""Compares losses of real runs with and without memplug: `python -m tests.bench.convergence`.

Trains the tiny Llama recipe (examples/llama2) on two processes of this machine, on the CPU, through every requested
combination of launcher, ZeRO stage, way in and alpha, and compares the loss of every step with a run of the same stage
without memplug (MEMO, section 5.5). With alpha 0 or 1 the losses are the same to the bit; with a split, rows are
computed by a matmul of another size, which rounds differently. Exits with 1 if a run failed or a loss is off.

A run of 50 steps takes about 20 seconds on two cores; the defaults are one launcher and one way in, 28 runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from tests.bench.table import Row, render, write_rows
from tests.support.folders import ROOT
from tests.support.launching import launch

BENCH = "convergence"
HEADERS = ("ZeRO", "launcher", "way in", "alpha", "steps", "first loss", "last loss", "max difference", "verdict")
LAUNCHERS = ("torchrun", "deepspeed")
WAYS = ("install", "attach", "run")
ALPHAS = ("0", "0.125", "0.25", "0.5", "1", "auto")
EXACT = ("0", "1")
TOLERANCE = 1e-3  # of the largest loss, if a matmul is split


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line: which runs; every list is combined with every other."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench.{BENCH}", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--steps", type=int, default=50, help="optimizer steps of a run [50]")
    add("--seq-len", type=int, default=64, help="tokens of a sequence [64]")
    add("--stages", type=int, nargs="+", choices=range(4), default=[0, 1, 2, 3], help="ZeRO stages [all]")
    add("--alphas", nargs="+", choices=ALPHAS, default=list(ALPHAS), help="[all]")
    add("--ways", nargs="+", choices=WAYS, default=["install"], help="ways in [install]")
    add("--launchers", nargs="+", choices=LAUNCHERS, default=["torchrun"], help="[torchrun]")
    add("--json", type=Path, metavar="FILE", help="write the rows here")
    return parser.parse_args(argv)


def losses(args: argparse.Namespace, launcher: str, stage: int, way: str, alpha: str) -> list[float]:
    """Run the recipe, and return the loss of every step.

    Args:
        args: The command line.
        launcher: One of `LAUNCHERS`.
        stage: ZeRO stage.
        way: One of `WAYS`, or "none".
        alpha: One of `ALPHAS`.

    Raises:
        RuntimeError: The run failed, or memplug was not at work in it (or was, without being asked to).
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "losses.jsonl"
        command = [ROOT / "examples/llama2/train.py", "--memplug", "none" if way == "run" else way]
        command += ["--steps", str(args.steps), "--seq-len", str(args.seq_len), "--zero-stage", str(stage)]
        command += ["--alpha", alpha, "--loss-log", log]
        command = ["memplug.run", *command] if way == "run" else command
        done = launch(command, launcher=launcher, module=way == "run", time_limit_s=120 + 2 * args.steps)
        if ("memplug: stable" in done.stdout) is not (way != "none"):
            raise RuntimeError(f"memplug was {'not ' * (way != 'none')}at work:\n{done.stdout}")
        return [entry["loss"] for entry in map(json.loads, log.read_text().splitlines()) if "step" in entry]


def compare(args: argparse.Namespace) -> Iterator[tuple[list[str], Row, bool]]:
    """Yield a line of the table, its row, and whether the losses are right, for every combination."""
    for stage in args.stages:
        expected = losses(args, args.launchers[0], stage, "none", "auto")
        for launcher, way, alpha in product(args.launchers, args.ways, args.alphas):
            measured = losses(args, launcher, stage, way, alpha)
            assert len(measured) == len(expected) == args.steps
            differences = [abs(one - other) for one, other in zip(measured, expected, strict=True)]
            largest = max(differences)
            allowed = 0.0 if alpha in EXACT else TOLERANCE * max(expected)
            verdict = "same to the bit" if largest == 0 else "within rounding" if largest <= allowed else "WRONG"
            line = [str(stage), launcher, way, alpha, str(args.steps)]
            line += [f"{measured[0]:.6f}", f"{measured[-1]:.6f}", f"{largest:.3g}", verdict]
            row = Row(
                bench=BENCH,
                case=f"zero{stage} {launcher} {way}",
                mode=f"alpha={alpha}",
                metric="max_loss_difference",
                unit="1",
                value=largest,
                n=args.steps,
            )
            yield line, row, largest <= allowed


def main(argv: list[str] | None = None) -> int:
    """Run all requested combinations, and return the exit status."""
    args = parse_args(argv)
    lines, rows, right = [], [], True
    for line, row, passed in compare(args):
        lines.append(line)
        rows.append(row)
        right = right and passed
        print(" ".join(line), file=sys.stderr, flush=True)
    print(render(HEADERS, lines, left=HEADERS.index("verdict")))
    if args.json:
        write_rows(args.json, rows)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
