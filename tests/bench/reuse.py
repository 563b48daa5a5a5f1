"""Measures how soon swapped tensors' memory is free again: `python -m tests.bench.reuse` (Chameleon, Fig. 8b), on CUDA.

Trains a Llama of Hugging Face's. For each tensor that is swapped in a step, counts the operators that are dispatched
between the tensor's last use, after which it is copied to the host, and the moment when the allocator has its memory
back:

* `record_stream`: torch's own way. A hook of saved tensors copies them on another stream; at each request the allocator
asks CUDA whether the copies are done.
* `list`: memplug's way. memplug releases the memory at the operator that the plan names, after an event.

On a simulated runtime (tests/cudasim) the schedule decides when copies are done, and the figures depend on it.
"""

from __future__ import annotations

import argparse
import bisect
import gc
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import memplug
from tests.bench.table import Row, figures, render, write_rows

BENCH = "reuse"
GIB = 1 << 30
WARM_UP = 8
"""Steps until a list is in force and steps are no longer observed."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line: the shape, and the share of a step's memory that has to be swapped."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench.{BENCH}", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--layers", type=int, default=16, help="[16]")
    add("--hidden", type=int, default=64, help="hidden size [64]")
    add("--tokens", type=int, default=512, help="of the one sequence [512]")
    add("--share", type=float, default=0.6, help="the list's budget, as a share of a step's memory [0.6]")
    add("--json", type=Path, metavar="FILE", help="write the rows there")
    return parser.parse_args(argv)


class Operators(TorchDispatchMode):
    """Records when each operator was dispatched, in nanoseconds of the epoch, and the result of `look` after each."""

    def __init__(self, look: Any = None) -> None:
        super().__init__()
        self.times_ns: list[int] = []
        self.seen: list[Any] = []
        self._look = look

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.times_ns.append(time.time_ns())
        result = func(*args, **(kwargs or {}))
        if self._look is not None:
            self.seen.append(self._look())
        return result


class Training:
    """One model that trains step by step."""

    def __init__(self, args: argparse.Namespace):
        torch.manual_seed(0)
        shape = {"hidden_size": args.hidden, "intermediate_size": 2 * args.hidden, "num_hidden_layers": args.layers}
        config = LlamaConfig(**shape, num_attention_heads=4, vocab_size=512, use_cache=False)
        self.model = LlamaForCausalLM(config).cuda().train()
        self.tokens = torch.randint(0, 512, (1, args.tokens), device="cuda")

    def step(self) -> float:
        """Run a step, and return its loss."""
        loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        self.model.zero_grad()
        return loss.item()


def intervals_of_record_stream(args: argparse.Namespace) -> list[int]:
    """Return the interval of every tensor that is saved for backward, except parameters and small tensors."""
    training, side, calls = Training(args), torch.cuda.Stream(), []
    parameters = {parameter.untyped_storage().data_ptr() for parameter in training.model.parameters()}

    def pack(tensor: torch.Tensor) -> Any:
        address = tensor.untyped_storage().data_ptr()
        if not tensor.is_cuda or address in parameters or tensor.nbytes < 1024:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(side)
        calls.append((time.time_ns(), address))
        return host

    def unpack(saved: torch.Tensor) -> torch.Tensor:
        torch.cuda.current_stream().wait_stream(side)
        return saved if saved.is_cuda else saved.to("cuda", non_blocking=True)

    for _ in range(WARM_UP):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            training.step()
    calls.clear()
    torch.cuda.memory._record_memory_history(context=None, max_entries=1 << 20)
    with Operators() as operators, torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        training.step()
    end_ns = time.time_ns()
    events: dict[str, dict[int, list[int]]] = {"free_requested": {}, "free_completed": {}}
    for event in torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]:
        if event["action"] in events:
            events[event["action"]].setdefault(event["addr"], []).append(1000 * event["time_us"])
    torch.cuda.memory._record_memory_history(enabled=None)

    def first(action: str, address: int, after_ns: int) -> int:
        return next((at_ns for at_ns in events[action].get(address, ()) if at_ns >= after_ns), end_ns)

    def until(call_ns: int, address: int) -> int:
        begin_ns = first("free_requested", address, call_ns)
        back_ns = first("free_completed", address, begin_ns)
        return bisect.bisect(operators.times_ns, back_ns) - bisect.bisect(operators.times_ns, begin_ns)

    return [until(*call) for call in calls]


def intervals_of_list(args: argparse.Namespace, budget_bytes: int) -> list[int]:
    """Return the interval of every tensor of the list."""
    training = Training(args)
    block = {
        "enabled": True,
        "plan_dir": False,
        "device_budget_gib": budget_bytes / GIB,
        "swap": {"enabled": True, "min_bytes": 1},
        "tokenwise": {"enabled": False},
        "arena": {"enabled": False},
        "profiler": {"wait_for_plans": True},
    }
    with memplug.attach(training.model, block) as session:
        for _ in range(WARM_UP):
            training.step()
            session.step()
        if session.report().swap.state != "swapping":
            raise SystemExit(f"there is no list: {session.report().swap.off_because}")

        def look() -> tuple[int, int]:
            counters = session._attached.boundary.followers.find("swap").counters
            return counters["offloads"], counters["releases"]

        before = look()
        with Operators(look) as operators:
            training.step()
        session.step()
    begun, back = ([counts[side] - before[side] for counts in operators.seen] for side in (0, 1))
    # Copies of one direction run one after another, and so do releases.
    return [bisect.bisect_left(back, number) - bisect.bisect_left(begun, number) for number in range(1, back[-1] + 1)]


def measure(args: argparse.Namespace) -> dict[str, list[int]]:
    """Return intervals by mode."""
    training = Training(args)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    training.step()
    most = torch.cuda.max_memory_allocated()
    budget_bytes = before + int(args.share * (most - before))
    del training
    gc.collect()
    found = {"record_stream": intervals_of_record_stream(args)}
    gc.collect()
    return {**found, "list": intervals_of_list(args, budget_bytes)}


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    args = parse_args(argv)
    rows, lines = [], []
    for mode, intervals in measure(args).items():
        mean, largest = sum(intervals) / len(intervals), max(intervals)
        lines.append([mode, str(len(intervals)), figures(mean, 3), str(largest)])
        for metric, value in (("mean", mean), ("largest", float(largest))):
            rows.append(Row(BENCH, f"{args.layers} layers", mode, metric, "1", value, len(intervals)))
    print(render(["mode", "tensors", "mean operators", "largest"], lines, left=0))
    if args.json:
        write_rows(args.json, rows)


if __name__ == "__main__":
    main()
