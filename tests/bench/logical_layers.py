"""Measures how evenly groups of operators take time: `python -m tests.bench.logical_layers` (Chameleon, Fig. 4, Eq. 1).

Trains a Llama of 32 layers. One step is recorded by memplug's recorder; others are timed by `torch.profiler`, whose
operators are matched to the recorded ones by their order. An operator's time is its self time on the CPU, and on CUDA
the time of the kernels that it launched itself. The operators of the forward, and those of the backward, are then
divided evenly into 1, 2, 4, ... groups:

| column | what it is |
|---|---|
| CV | coefficient of variation of the groups' times: standard deviation over mean |
| inner | CV without the first and the last group, which hold the embedding and the head |
| error | mean of abs(estimated - measured) / measured; estimated by the group's share of the pass's operators |
| Eq. 1 | this error for the estimate T_iter / N_iter * N_group, from an unwatched step and all of its operators |

In the line `layers` the groups are the model's own decoder layers, as the recorder saw them begin and end. Their times
vary because of the machine, not of the division. The time of an operator is its median over steps.
"-": there are too few groups, or a group launched no kernel and so has no relative error.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from operator import itemgetter
from pathlib import Path

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from memplug.hooks.places import Places
from memplug.profile.recorder import Detail, Recorder
from memplug.profile.trace import Fingerprint, Pass, Trace
from tests.bench.table import Row, figures, render, write_rows
from tests.support.grouping import estimate_error, group_variation
from tests.support.logical_layers import group_edges

BENCH = "logical_layers"
PASSES = (Pass.FORWARD, Pass.BACKWARD)
METRICS = {"cv": "CV", "inner_cv": "inner", "error": "error", "eq1_error": "Eq. 1"}
LAYERS = "layers"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line: the shape, the groups, and how long to measure."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench.{BENCH}", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", default="cuda" if cuda else "cpu", help="[cuda where there is one]")
    add("--layers", type=int, default=32, help="[32]")
    add("--hidden", type=int, default=4096 if cuda else 256, help="hidden size [4096; CPU: 256]")
    add("--tokens", type=int, default=4096 if cuda else 256, help="of the one sequence [4096; CPU: 256]")
    add("--optimizer", choices=("none", "adamw"), default="none", help="part of the step, and so of Eq. 1 [none]")
    add("--groups", type=int, nargs="+", default=[2**i for i in range(10)], help="[1 2 4 ... 512]")
    add("--repetitions", type=int, default=15, help="steps that are timed [15]")
    add("--json", type=Path, metavar="FILE", help="write the rows here")
    return parser.parse_args(argv)


class Training:
    """A Llama of Llama2-7B's proportions."""

    def __init__(self, args: argparse.Namespace):
        config = LlamaConfig(
            hidden_size=args.hidden,
            intermediate_size=args.hidden * 43 // 16,
            num_hidden_layers=args.layers,
            num_attention_heads=max(4, args.hidden // 128),
            vocab_size=args.hidden * 125 // 16,
            use_cache=False,
            max_position_embeddings=args.tokens,
        )
        torch.manual_seed(0)
        self.device = torch.device(args.device)
        with self.device:
            self.model = LlamaForCausalLM(config).to(torch.bfloat16 if self.device.type == "cuda" else torch.float32)
            self.tokens = torch.randint(0, config.vocab_size, (1, args.tokens))
        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-5) if args.optimizer == "adamw" else None

    def step(self) -> None:
        """Run one forward and one backward, and the optimizer if there is one."""
        self.model(input_ids=self.tokens, labels=self.tokens).loss.backward()
        if self.optimizer:
            self.optimizer.step()
        self.model.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self) -> float:
        """Return the seconds of an unwatched step; on the CPU processor time, which other programs do not change."""
        clock = time.perf_counter if self.device.type == "cuda" else time.process_time
        begin = clock()
        self.step()
        return clock() - begin

    def record(self) -> Trace:
        """Return the operators of a step, with their passes and layers."""
        recorder = Recorder(self.device)
        layers = [(f"model.layers.{i}", layer) for i, layer in enumerate(self.model.model.layers)]
        places = Places(self.model, layers, recorder)
        places.install()
        try:
            recorder.begin(Detail.REQUESTS)
            self.step()
            return recorder.end(Fingerprint(), places.layers)
        finally:
            places.remove()
            recorder.stop()

    def profile(self) -> list[tuple[str, float]]:
        """Return name and seconds of each operator of a step, in the order in which they began."""
        cuda = self.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        with profile(activities=activities) as profiler:
            self.step()
        events = [event for event in profiler.events() if event.device_type == DeviceType.CPU]
        events.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
        return [
            (event.name, (event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e6)
            for event in events
        ]


def match(names: Sequence[str], profiled: Sequence[tuple[str, float]]) -> np.ndarray:
    """Assign the times of profiled operators to recorded ones, by their order.

    Args:
        names: Names of the recorded operators, without overloads.
        profiled: Name and seconds of the profiled operators, and of all other events that the profiler shows.

    Returns:
        float64[operators]; 0 for operators that the profiler never shows. If consecutive operators have the same name,
            the profiler may show fewer of them, since it merges an operator with the only operator that it calls; the
            last ones then get 0.

    Raises:
        ValueError: `names` and `profiled` are not of the same program.
    """
    recorded, shown = set(names), {name for name, _ in profiled}
    rows = groupby((index for index, name in enumerate(names) if name in shown), names.__getitem__)
    profiled_rows = groupby((pair for pair in profiled if pair[0] in recorded), itemgetter(0))
    times = np.zeros(len(names))
    for (name, row), (profiled_name, profiled_row) in zip_longest(rows, profiled_rows, fillvalue=("the end", ())):
        indices, seconds = list(row), [value for _, value in profiled_row]
        if name != profiled_name or len(seconds) > len(indices):
            raise ValueError(
                f"at operator {indices[0] if indices else len(names)}, {len(indices)} of {name} were recorded, and "
                f"{len(seconds)} of {profiled_name} profiled"
            )
        times[indices[: len(seconds)]] = seconds
    return times


@dataclass(frozen=True)
class Measured:
    """A program and its times, each a median over steps.

    Attributes:
        trace: One recorded step.
        operator_s: Time of each of the trace's operators; float64[operators].
        step_s: Time of an unwatched step.
    """

    trace: Trace
    operator_s: np.ndarray
    step_s: float

    @property
    def kinds(self) -> np.ndarray:
        """Return the pass in which each operator runs.

        Returns:
            int64[operators].
        """
        return np.array([phase.kind for phase in self.trace.phases])[self.trace.operators["phase"]]


def measure(training: Training, repetitions: int) -> Measured:
    """Record one step, then time steps, in turn with the profiler and without it."""
    for _ in range(2):
        training.step()
    trace = training.record()
    names = [trace.names[number].partition(".")[0] for number in trace.operators["name"]]
    match(names, training.profile())  # the first use of the profiler is slow
    operator_s, step_s = [], []
    for _ in range(repetitions):
        operator_s.append(match(names, training.profile()))
        step_s.append(training.seconds())
    return Measured(trace, np.median(operator_s, axis=0), statistics.median(step_s))


def figures_of(measured: Measured, kind: Pass, groups: int | str) -> dict[str, float]:
    """Return each of METRICS; a value that does not exist is not finite.

    Args:
        measured: The program and its times.
        kind: The forward or the backward.
        groups: Number of groups, or LAYERS.
    """
    of_pass = measured.kinds == kind
    operator_s, layer = measured.operator_s[of_pass], measured.trace.operators["layer"][of_pass]
    per_operator = measured.step_s / len(of_pass)
    if groups == LAYERS:
        found = _of_layers(operator_s, layer, per_operator)
    else:
        found = _of_groups(operator_s, int(groups), per_operator)
    return dict(zip(METRICS, found, strict=True))


def _of_groups(operator_s: np.ndarray, groups: int, per_operator: float) -> tuple[float, ...]:
    edges = group_edges(len(operator_s), groups)
    inner = operator_s[edges[1] : edges[-2]]
    return (
        group_variation(operator_s, groups),
        group_variation(inner, groups - 2) if groups > 2 else np.nan,
        estimate_error(operator_s, groups),
        estimate_error(operator_s, groups, per_operator),
    )


def _of_layers(operator_s: np.ndarray, layer: np.ndarray, per_operator: float) -> tuple[float, ...]:
    inside = layer >= 0
    times, sizes = np.bincount(layer[inside], operator_s[inside]), np.bincount(layer[inside])
    inner = times[1:-1]
    return (
        float(times.std() / times.mean()),
        float(inner.std() / inner.mean()) if len(inner) else np.nan,
        *(float(np.mean(np.abs(rate * sizes - times) / times)) for rate in (operator_s.mean(), per_operator)),
    )


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    args = parse_args(argv)
    torch.set_num_threads(1)
    case = f"{args.layers} layers of {args.hidden}, {args.tokens} tokens, optimizer {args.optimizer}, {args.device}"
    measured = measure(Training(args), args.repetitions)
    rows, lines = [], []
    for groups in [*args.groups, LAYERS]:
        line = [str(groups)]
        for kind in PASSES:
            for metric, value in figures_of(measured, kind, groups).items():
                line.append(figures(value, 3) if np.isfinite(value) else "-")
                if np.isfinite(value):
                    mode = f"{kind.name.lower()} {groups}"
                    rows.append(Row(BENCH, case, mode, metric, "1", value, args.repetitions))
        lines.append(line)
    headers = ["groups", *(f"{kind.name.lower()} {title}" for kind in PASSES for title in METRICS.values())]
    print(f"{case}\n\n{render(headers, lines, left=0)}\n")
    for line in _summary(measured):
        print(line)
    if args.json:
        write_rows(args.json, rows)


def _summary(measured: Measured) -> list[str]:
    """Return lines that show which pass has how many operators and seconds; they explain the error of Eq. 1."""
    kinds, outside = measured.kinds, measured.trace.operators["layer"] < 0
    lines = [f"a step takes {figures(measured.step_s)} s and has {len(kinds)} operators:"]
    for kind in np.unique(kinds):
        of_pass = kinds == kind
        lines.append(
            f"  {Pass(kind).name.lower()}: {of_pass.sum()} that take {_ms(measured.operator_s[of_pass])}, "
            f"{(of_pass & outside).sum()} of them, {_ms(measured.operator_s[of_pass & outside])}, outside of layers"
        )
    return lines


def _ms(operator_s: np.ndarray) -> str:
    return f"{figures(1e3 * operator_s.sum(), 3)} ms"


if __name__ == "__main__":
    main()
