"""Measures the host's time in steps that consist of little else: `python -m tests.bench.host_time`.

The layers are so small that Python, torch and memplug take most of a step's time. Each mode has a process with one
thread; the processes take turns, round by round. They measure processor time: of the forward pass, of the backward
pass, and of the whole step, memplug's work at its end included.

Two processes that do the same work differ by up to a tenth, for as long as they live, depending on where their memory
is and on what else they train. So a mode's process has one model, and trains it without the mode, with the mode, and
without it again: memplug is attached and detached in between.

| mode | what it is |
|---|---|
| `keep_all` | unchanged autograd |
| `reentrant` | `torch.utils.checkpoint` around every layer; in case c Megatron-Core's own |
| `non_reentrant` | `torch.utils.checkpoint` around every layer; not in case c |
| `memplug:A`, `memplug:A+arena` | alpha 0, 1 or auto, without and with the arena; tensors of any size are swapped |
| `memplug:plain`, `memplug:plain+arena` | alpha auto, and the device has space for everything |

| case | what it is |
|---|---|
| `a` | 16 Hugging Face Llama layers, hidden size 64, 32 tokens |
| `b` | the same, hidden size 256, 256 tokens |
| `c` | 16 Megatron-Core layers, hidden size 64, 32 tokens |
| `d` | 16 layers of the stand-in of Transformer Engine (tests/support/stand_ins), hidden size 64, 32 tokens |
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from tests.bench.table import Row, figures, render, write_rows
from tests.support.folders import ROOT

BENCH = "host_time"
ALPHAS = ("0", "1", "auto", "plain")
MODES = (
    "keep_all",
    "reentrant",
    "non_reentrant",
    *(f"memplug:{alpha}{arena}" for alpha in ALPHAS for arena in ("", "+arena")),
)
PARTS = ("forward", "backward", "step")
HEADERS = ("case", "mode", *(f"{part} ms" for part in PARTS), *(f"{part} over keep_all" for part in PARTS))


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of a case: the origin of its layers, and their number and sizes."""

    host: str
    layers: int
    hidden: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class Turn:
    """Processor seconds of one part of a mode's steps, and of the keep-all steps before and after them."""

    seconds: float
    kept_all: float

    @property
    def over(self) -> float:
        """Return the mode's seconds over those of keeping everything."""
        return self.seconds / self.kept_all


CASES = {
    "a": Shape("transformers", 16, 64, 32),
    "b": Shape("transformers", 16, 256, 256),
    "c": Shape("megatron", 16, 64, 32),
    "d": Shape("transformer_engine", 16, 64, 32),
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line: which cases and modes, and for how long."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench.{BENCH}", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--cases", nargs="+", choices=list(CASES), default=list(CASES), help="[all]")
    add("--modes", nargs="+", choices=MODES, default=list(MODES), help="[all]")
    add("--layers", type=int, help="instead of the case's")
    add("--steps", type=int, default=40, help="measured in each turn of a mode [40]")
    add("--rounds", type=int, default=7, help="turns of each mode [7]")
    add("--json", type=Path, metavar="FILE", help="write the rows here")
    return parser.parse_args(argv)


class Child:
    """A process that trains one case in one mode, and measures on request."""

    def __init__(self, mode: str, shape: Shape):
        command = [sys.executable, "-m", f"tests.bench.{BENCH}", "--child", mode, json.dumps(dataclasses.asdict(shape))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        )

    def measure(self, steps: int) -> dict[str, Turn]:
        """Return a turn of each part of a step, from medians of so many steps."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process of {self.process.args} ended with {self.process.wait()}")
        return {part: Turn(*seconds) for part, seconds in json.loads(answer).items()}

    def stop(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(shape: Shape, modes: list[str], steps: int, rounds: int) -> dict[str, dict[str, list[Turn]]]:
    """Return turns by mode and part, one for each round; every mode warms up before the first round."""
    turns: dict[str, dict[str, list[Turn]]] = {mode: {part: [] for part in PARTS} for mode in modes}
    children = {mode: Child(mode, shape) for mode in modes}
    try:
        for child in children.values():
            child.measure(1)
        for _ in range(rounds):
            for mode, child in children.items():
                for part, turn in child.measure(steps).items():
                    turns[mode][part].append(turn)
    finally:
        for child in children.values():
            child.stop()
    return turns


def serve(mode: str, shape: Shape) -> None:
    """Run as the child: train, and answer requests with measurements."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries' output must not mix with answers
    from tests.bench.host_training import in_mode, training_of

    training = training_of(shape)

    def seconds(trained: str, steps: int) -> dict[str, float]:
        with in_mode(training, trained, shape):
            measured = [training.timed_step() for _ in range(steps)]
        return {part: statistics.median(step[part] for step in measured) for part in PARTS}

    for line in sys.stdin:
        before, own, after = (seconds(trained, int(line)) for trained in ("keep_all", mode, "keep_all"))
        turns = {part: (own[part], (before[part] + after[part]) / 2) for part in PARTS}
        answers.write(json.dumps(turns) + "\n")
        answers.flush()


def _is_of(mode: str, case: str) -> bool:
    return mode != "non_reentrant" or case != "c"


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    args = parse_args(argv)
    modes = list(dict.fromkeys(["keep_all", *args.modes]))
    rows: list[Row] = []
    for name in args.cases:
        lines = []
        shape = CASES[name] if args.layers is None else dataclasses.replace(CASES[name], layers=args.layers)
        case = f"{name}: {shape.layers} {shape.host} layers, hidden {shape.hidden}, {shape.tokens} tokens"
        own_modes = [mode for mode in modes if _is_of(mode, name)]
        turns = measure(shape, own_modes, args.steps, args.rounds)
        for mode in own_modes:
            own = {part: statistics.median(turn.seconds for turn in turns[mode][part]) for part in PARTS}
            over = {part: statistics.median(turn.over for turn in turns[mode][part]) for part in PARTS}
            rows += [Row(BENCH, case, mode, f"{part}_s", "s", own[part], args.rounds) for part in PARTS]
            rows += [Row(BENCH, case, mode, f"{part}_over_keep_all", "1", over[part], args.rounds) for part in PARTS]
            lines.append(
                (name, mode, *(figures(own[part] * 1e3, 3) for part in PARTS), *(f"{over[part]:.2f}" for part in PARTS))
            )
        print(render(HEADERS, lines, left=1), flush=True)
        if args.json:
            write_rows(args.json, rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        serve(sys.argv[2], Shape(**json.loads(sys.argv[3])))
    else:
        main()
