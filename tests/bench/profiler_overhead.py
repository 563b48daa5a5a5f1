"""Measures the cost of watching: `python -m tests.bench.profiler_overhead`.

Trains a Llama of 32 layers in one process, with forward, backward and optimizer. The modes take turns, for a block of
steps each, and their medians are compared with the first mode's:

| mode | what it is |
|---|---|
| `baseline` | nothing watches |
| `stable` | as a stable session watches: the operators of one step in eight, autograd's node count in the others |
| `lightweight` | the operators of every step, as integers |
| `requests` | every step recorded: operators, places, memory requests |
| `detailed` | every step recorded, up to the finished `Trace`: also the storages that operators use |
| `dispatch_mode` | a Python dispatch mode that appends each operator to a list |
| `torch.profiler` | with shapes and stacks; its start and its end are not counted |

The CPU is the worst case: one thread runs a model so small that the host's work takes most of a step. The last printed
line, the time of a step with a quarter of the tokens, shows how much of a step's time that work takes.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from memplug.hooks.places import Places
from memplug.profile.recorder import Detail, Recorder
from memplug.profile.trace import Fingerprint
from memplug.session.boundary import WATCHED_STEPS
from tests.bench.table import Row, figures, render, write_rows

BENCH = "profiler_overhead"
HEADERS = ("case", "mode", "step s", "over baseline", "n")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line: the shape, and how long to measure."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench.{BENCH}", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", default="cuda" if cuda else "cpu", help="[cuda where there is one]")
    add("--layers", type=int, default=32, help="[32]")
    add("--hidden", type=int, default=4096 if cuda else 64, help="hidden size [4096; CPU: 64]")
    add("--tokens", type=int, default=2048 if cuda else 64, help="of the one sequence [2048; CPU: 64]")
    add("--rounds", type=int, default=5, help="blocks of each mode [5]")
    add("--modes", nargs="+", choices=list(MODES), default=list(MODES), help="[all]")
    add("--json", type=Path, metavar="FILE", help="write the rows here")
    return parser.parse_args(argv)


class Training:
    """A Llama and its optimizer."""

    def __init__(self, device: str, layers: int, hidden: int, tokens: int):
        heads = max(4, hidden // 128)
        config = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=hidden * 43 // 16 // 4 * 4,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            vocab_size=256,
            use_cache=False,
            max_position_embeddings=tokens,
        )
        torch.manual_seed(0)
        self.device = torch.device(device)
        with self.device:
            self.model = LlamaForCausalLM(config).to(torch.bfloat16 if self.device.type == "cuda" else torch.float32)
            self.tokens = torch.randint(0, config.vocab_size, (1, tokens))
        # AdamW on the CPU is a loop in Python; on a GPU its state would double the memory.
        make = torch.optim.SGD if self.device.type == "cuda" else torch.optim.AdamW
        self.optimizer = make(self.model.parameters(), lr=1e-4)
        self.layers = [(f"model.layers.{i}", layer) for i, layer in enumerate(self.model.model.layers)]

    def step(self) -> None:
        """Run forward, backward and the optimizer."""
        self.model(input_ids=self.tokens, labels=self.tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds(self, step: Callable[[], Any], steps: int) -> float:
        """Return the mean seconds of `steps` steps, with all work on the device done.

        On the CPU they are processor time, which other programs on the machine affect less than the clock.
        """
        clock = time.perf_counter if self.device.type == "cuda" else time.process_time
        self._synchronize()
        begin = clock()
        for _ in range(steps):
            step()
        self._synchronize()
        return (clock() - begin) / steps

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


Steps = Iterator[Callable[[], Any]]


@contextlib.contextmanager
def _baseline(training: Training) -> Steps:
    yield training.step


@contextlib.contextmanager
def _stable(training: Training) -> Steps:
    recorder = Recorder(training.device)
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        training.step()
        recorder.take(), recorder.take_nodes()
        recorder.watch(count % WATCHED_STEPS == 0)

    recorder.watch(False)
    yield step
    recorder.stop()


@contextlib.contextmanager
def _lightweight(training: Training) -> Steps:
    recorder = Recorder(training.device)

    def step() -> None:
        training.step()
        recorder.take(), recorder.take_nodes()

    yield step
    recorder.stop()


@contextlib.contextmanager
def _recorded(training: Training, detail: Detail) -> Steps:
    recorder = Recorder(training.device)
    places = Places(training.model, training.layers, recorder)

    def step() -> None:
        places.install()
        recorder.begin(detail)
        training.step()
        places.remove()
        recorder.take()
        recorder.end(Fingerprint(), places.layers)

    yield step
    recorder.stop()


class _Listing(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _dispatch_mode(training: Training) -> Steps:
    def step() -> None:
        with _Listing():
            training.step()

    yield step


@contextlib.contextmanager
def _torch_profiler(training: Training) -> Steps:
    activities = [ProfilerActivity.CPU]
    if training.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True, with_stack=True):
        yield training.step


MODES: dict[str, Callable[[Training], Any]] = {
    "baseline": _baseline,
    "stable": _stable,
    "lightweight": _lightweight,
    "requests": lambda training: _recorded(training, Detail.REQUESTS),
    "detailed": lambda training: _recorded(training, Detail.TENSORS),
    "dispatch_mode": _dispatch_mode,
    "torch.profiler": _torch_profiler,
}


def measure(training: Training, modes: list[str], rounds: int) -> dict[str, list[float]]:
    """Return seconds of a step, one figure for each block of `WATCHED_STEPS` steps.

    Each mode has a block in each round.
    """
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    for index in range(rounds + 1):  # the first round warms up
        for mode in modes:
            with MODES[mode](training) as step:
                taken = training.seconds(step, WATCHED_STEPS if index else 2)
            if index:
                seconds[mode].append(taken)
    return seconds


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    args = parse_args(argv)
    torch.set_num_threads(1)
    case = f"{args.layers} layers of {args.hidden}, {args.tokens} tokens, {args.device}"
    training = Training(args.device, args.layers, args.hidden, args.tokens)
    modes = list(dict.fromkeys(["baseline", *args.modes]))
    seconds = measure(training, modes, args.rounds)
    baseline = statistics.median(seconds["baseline"])
    rows, lines = [], []
    for mode in modes:
        median = statistics.median(seconds[mode])
        ratio = statistics.median(own / other for own, other in zip(seconds[mode], seconds["baseline"], strict=True))
        rows.append(Row(BENCH, case, mode, "step_s", "s", median, args.rounds))
        rows.append(Row(BENCH, case, mode, "over_baseline", "1", ratio, args.rounds))
        lines.append([case, mode, figures(median), f"{ratio:.3f}", str(args.rounds)])
    print(render(HEADERS, lines, left=1))
    quarter = Training(args.device, args.layers, args.hidden, max(1, args.tokens // 4))
    smaller = statistics.median(measure(quarter, ["baseline"], args.rounds)["baseline"])
    rows.append(Row(BENCH, case, "baseline", "quarter_of_the_tokens_over_all", "1", smaller / baseline, args.rounds))
    print(f"\na step of a quarter of the tokens takes {smaller / baseline:.2f} of the baseline's step")
    if args.json:
        write_rows(args.json, rows)


if __name__ == "__main__":
    main()
