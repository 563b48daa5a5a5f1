"""Measures what the planned arena costs and saves: `python -m tests.bench.arena`.

Trains Llama and Mixtral shapes, without and with recomputation of every layer, with one and with two micro-batches in
flight. The modes take turns, for a block of steps each, and their medians are compared:

| mode | what it is |
|---|---|
| `native` | torch's own allocator: the session is detached |
| `arena` | a session with the planned arena, and nothing else |

Efficiency is live peak / reserved. On CUDA the reserved memory is measured. For the CPU's allocator, which does
not count reserved memory, and for expandable segments, a simulation (`tests.bench.caching_allocator`) tells how much
CUDA's allocator would reserve for a recorded step. Only the step's own requests count.

Host time per allocation is the time of a malloc and its free, in C++, over all requests of the recorded step in their
order. On the CPU neither mode touches the memory, so no page faults count.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

import memplug
from memplug.arena.arena import Arena
from memplug.arena.plan import auto
from memplug.arena.plan.from_trace import last_step, problem_of
from memplug.arena.plan.part import address_plan
from memplug.arena.tables import tables_of
from memplug.native import building
from memplug.profile.recorder import Detail, Recorder
from memplug.profile.trace import EventKind, Fingerprint, Trace
from tests.bench.caching_allocator import reserved
from tests.bench.table import Row, figures, render, write_rows

BENCH = "arena"
MODELS = ("llama", "mixtral")
BLOCK = {"enabled": True, "plan_dir": False, "tokenwise": {"enabled": False}}
HEADERS = (
    "case", "step s native", "arena", "arena/native", "served", "live peak MiB", "arena MiB", "efficiency native",
    "expandable", "arena", "host ns native", "arena", "n",
)  # fmt: skip

_SOURCE = """
#include <torch/extension.h>
#include <chrono>

double run(const torch::Tensor& request, const torch::Tensor& nbytes, int64_t requests, c10::Allocator& allocator) {
  const auto* which = request.data_ptr<int64_t>();
  const auto* size = nbytes.data_ptr<int64_t>();
  std::vector<c10::DataPtr> blocks(requests);
  const auto begin = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < request.numel(); ++i) {
    if (size[i] > 0) {
      blocks[which[i]] = allocator.allocate(size[i]);
    } else {
      blocks[which[i]].clear();
    }
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}
"""
_CPU = (
    "#include <c10/core/CPUAllocator.h>\n"
    "double replay(torch::Tensor a, torch::Tensor b, int64_t n) { return run(a, b, n, *c10::GetCPUAllocator()); }"
)
_CUDA = (
    "#include <c10/cuda/CUDACachingAllocator.h>\n"
    "double replay(torch::Tensor a, torch::Tensor b, int64_t n) "
    "{ return run(a, b, n, *c10::cuda::CUDACachingAllocator::get()); }"
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A training to measure.

    Attributes:
        model: One of MODELS.
        recompute: Whether backward recomputes every layer.
        micro_batches: Number of forwards before the first backward.
    """

    model: str
    recompute: bool
    micro_batches: int

    def __str__(self) -> str:
        return f"{self.model}, {'recomputed' if self.recompute else 'kept'}, {self.micro_batches} in flight"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line: the shapes, and how long to measure."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench.{BENCH}", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", default="cuda" if cuda else "cpu", help="[cuda where there is one]")
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), help="[both]")
    add("--layers", type=int, default=8 if cuda else 4, help="[8; CPU: 4]")
    add("--hidden", type=int, default=4096 if cuda else 256, help="hidden size [4096; CPU: 256]")
    add("--tokens", type=int, default=8192 if cuda else 256, help="of a micro-batch [8192; CPU: 256]")
    add("--steps", type=int, default=10, help="of a block [10]")
    add("--rounds", type=int, default=5, help="blocks of each mode [5]")
    add("--json", type=Path, metavar="FILE", help="write the rows here")
    return parser.parse_args(argv)


class Training:
    """One case on one device."""

    def __init__(self, case: Case, args: argparse.Namespace):
        torch.manual_seed(0)
        self.case, self.device = case, torch.device(args.device)
        self.model = _model(case.model, args).to(self.device)
        if self.device.type == "cuda":
            self.model = self.model.bfloat16()
        if case.recompute:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, foreach=False)
        self.batches = torch.randint(0, 512, (case.micro_batches, 1, args.tokens), device=self.device)

    def step(self) -> float:
        """Run one step, also on the device, and return its seconds."""
        begin = time.perf_counter()
        losses = [self.model(batch, labels=batch).loss for batch in self.batches]
        while losses:
            losses.pop(0).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin


def _model(name: str, args: argparse.Namespace) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    heads = max(1, args.hidden // 128)
    sizes = {"hidden_size": args.hidden, "num_hidden_layers": args.layers, "num_attention_heads": heads}
    sizes |= {"vocab_size": 512 if args.device == "cpu" else 32000, "num_key_value_heads": heads}
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(intermediate_size=args.hidden * 11 // 4, **sizes))
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(intermediate_size=args.hidden * 7 // 8, **sizes, **experts))


def measure(case: Case, args: argparse.Namespace) -> dict[tuple[str, str], list[float]]:
    """Return all figures of a case, by mode and metric."""
    training = Training(case, args)
    found: dict[tuple[str, str], list[float]] = {}

    def note(mode: str, metric: str, value: float) -> None:
        found.setdefault((mode, metric), []).append(value)

    for _ in range(2):
        training.step()
    for _ in range(args.rounds):
        with _memory(training.device, functools.partial(note, "native")):
            for _ in range(args.steps):
                note("native", "step_s", training.step())
        step = _serve(training, args.steps, note)
    requested = last_step(step)
    for name, expandable in (("simulated", False), ("simulated expandable", True)):
        reserved_bytes, peak_bytes = reserved(_requests(requested), expandable=expandable)
        note(name, "efficiency", peak_bytes / reserved_bytes)
    for mode, seconds in host_seconds(requested, training.device).items():
        note(mode, "host_s_per_allocation", seconds)
    return found


def _requests(step: Trace) -> np.ndarray:
    """Return the step's requests for the simulation, without empty requests and requests from before the step.

    Returns:
        int64[k, 4]: kind, request, bytes, stream.
    """
    events = step.events[step.events["request"] >= 0]
    events = events[step.requests["nbytes"][events["request"]] > 0]
    return np.stack([events[name].astype(np.int64) for name in ("kind", "request", "nbytes", "stream")], axis=1)


def _serve(training: Training, steps: int, note: Callable[[str, str, float], None]) -> Trace:
    """Measure a block of steps in a session whose arena serves; return a step that was recorded after it."""
    with memplug.attach(training.model, BLOCK) as session:
        training.step()
        session.step()
        serving = session._attached.boundary.followers.find("arena")  # the arena is claimed at the first forward
        while serving.state.value != "serving":
            training.step()
            session.step()
        training.step()
        session.step()
        training_s = []
        with _memory(training.device, functools.partial(note, "arena")):
            for _ in range(steps):
                training_s.append(training.step())
                session.step()
        for seconds in training_s:
            note("arena", "step_s", seconds)
        report = session.report().arena
        note("arena", "served", report.step_served)
        note("arena", "live_peak_bytes", serving.plan.predictions.live_peak_bytes)
        note("arena", "arena_bytes", report.bytes)
        if training.device.type == "cpu":
            note("arena", "efficiency", report.efficiency)
        session.record()
        for _ in range(2):
            training.step()
            session.step()
        assert session.trace is not None
        return last_step(session.trace)


@contextlib.contextmanager
def _memory(device: torch.device, note: Callable[[str, float], None]) -> Any:
    """Note how much memory CUDA reserves while the block runs, and how much of it is in use at the peak."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    peak, most = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    note("peak_allocated_bytes", peak)
    note("peak_reserved_bytes", most)
    note("efficiency", peak / most)


# -- host time ---------------------------------------------------------------------------------------------------------


@functools.cache
def _replayer(device: str) -> ModuleType:
    from torch.utils.cpp_extension import load_inline

    cuda = device != "cpu"
    return load_inline(
        f"replay_{device}",
        _SOURCE + (_CUDA if cuda else _CPU),
        functions=["replay"],
        extra_cflags=["-O2", "-DNDEBUG"],
        extra_include_paths=list(map(str, building.cuda_headers())) if cuda else [],
        extra_ldflags=["-lc10_cuda"] if cuda else [],
    )


def host_seconds(step: Trace, device: torch.device, rounds: int = 15) -> dict[str, float]:
    """Return the mean seconds of a malloc and its free, by mode, over the requests of a step in their order."""
    events = step.events[step.events["request"] >= 0]
    request = torch.from_numpy(events["request"].copy())
    sizes = np.where(events["kind"] == EventKind.MALLOC, np.maximum(events["nbytes"], 1), -1)
    replay = functools.partial(_replayer(device.type).replay, request, torch.from_numpy(sizes), len(step.requests))
    recorder = Recorder(device)
    recorder.watch(False)
    for _ in range(2):
        recorder.begin(Detail.REQUESTS)
        replay()
        recorded = recorder.end(Fingerprint(), [])
    problem = problem_of(last_step(recorded))
    tables = tables_of(address_plan(problem, auto.plan(problem)))
    arena = Arena(device)
    seconds: dict[str, list[float]] = {"native": [], "arena": []}
    for _ in range(rounds):
        seconds["native"] += [replay() for _ in range(3)]
        arena.serve(tables)
        before = arena.counters()
        for _ in range(3):
            recorder.forget()
            arena.begin_step()
            seconds["arena"].append(replay())
            arena.end_step()
        assert arena.counters().mismatched == before.mismatched, "every request is served"
        arena.close()
    recorder.stop()
    return {mode: statistics.median(times) / len(step.requests) for mode, times in seconds.items()}


# -- output ----------------------------------------------------------------------------------------------------------

UNITS = {"step_s": "s", "host_s_per_allocation": "s", "served": "1", "efficiency": "1"}


def rows_of(case: Case, found: dict[tuple[str, str], list[float]]) -> list[Row]:
    """Return a row for each figure, with the median."""
    return [
        Row(BENCH, str(case), mode, metric, UNITS.get(metric, "bytes"), statistics.median(values), len(values))
        for (mode, metric), values in found.items()
    ]


def line(case: Case, rows: list[Row]) -> list[str]:
    """Return a line of the table; cells that were not measured on this device are "-"."""
    value = {(row.mode, row.metric): row.value for row in rows}

    def cell(mode: str, metric: str, scale: float = 1, digits: int = 4) -> str:
        found = value.get((mode, metric))
        return figures(None if found is None else found * scale, digits)

    of_native = "native" if ("native", "efficiency") in value else "simulated"
    return [
        str(case),
        cell("native", "step_s"),
        cell("arena", "step_s"),
        figures(value["arena", "step_s"] / value["native", "step_s"]),
        cell("arena", "served"),
        cell("arena", "live_peak_bytes", 2**-20),
        cell("arena", "arena_bytes", 2**-20),
        cell(of_native, "efficiency", digits=3),
        cell("simulated expandable", "efficiency", digits=3),
        cell("arena", "efficiency", digits=4),
        cell("native", "host_s_per_allocation", 1e9, 3),
        cell("arena", "host_s_per_allocation", 1e9, 3),
        str(next(row.n for row in rows if row.metric == "step_s")),
    ]


def main(argv: list[str] | None = None) -> None:
    """Measure every case and print the table."""
    args = parse_args(argv)
    torch.set_num_threads(1)
    rows, lines = [], []
    for model in args.models:
        for recompute in (False, True):
            for micro_batches in (1, 2):
                case = Case(model, recompute, micro_batches)
                measured = rows_of(case, measure(case, args))
                rows += measured
                lines.append(line(case, measured))
    print(render(HEADERS, lines, left=0))
    if args.json:
        write_rows(args.json, rows)


if __name__ == "__main__":
    main()
