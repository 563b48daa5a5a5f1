"""Compares memplug's step time and peak memory with its alternatives: `python -m tests.bench.step_time`.

A step is forward and backward of one sequence through Llama decoder layers, without embedding, head and optimizer.
Every mode (tests/bench/cases.py) has a process of its own; for each case the modes run in turn, `--rounds` times, and
the table holds medians. Times are the device's own on CUDA. tests/bench/memory.py says what peaks are; gradient buffers
exist from the first step on. GB are 10^9 bytes. Exits with 1 if a mode failed or its gradients differ from
`keep_all`'s.

With `--budget B` memplug has B times the memory that `full` reserves. Without `--budget` memplug has all memory of the
device, and keeps everything if the device's memory is enough.

`--device virtual` predicts: the same steps on the virtual device (memplug/predict/virtual), with the rates of `--gpu`.

Targets on one H200 with `7b`: over `keep_all` at most 1.10 / 1.03 / 1.015 / 1.01 at 8,192 / 32,768 / 65,536 / 131,072
tokens, with a peak no higher than `full`'s.

If `keep_all` does not fit, `keep_all` is measured with a half and a quarter of the layers and extrapolated, since its
figures are linear in the layers. The table marks extrapolated figures with *. Gradients are then compared with
`full`'s.

`--host megatron` runs Megatron-Core's layers, and `--host megatron-te` runs Megatron-Core's layers of Transformer
Engine's modules. The other modes are then Megatron-Core's own recomputation and offloading (tests/bench/megatron.py).

The defaults take about 7 minutes on an H200 and 1 minute on two CPU cores; `save_on_cpu` and `deepspeed`, up to three
times slower than the rest, run at 32,768 tokens only unless --modes names them.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from pathlib import Path
from typing import Any

from tests.bench import worker
from tests.bench.cases import (
    ATTENTION,
    CHECKPOINTS,
    HOSTS,
    MODELS,
    MODES,
    OWN,
    OWN_MODES,
    Case,
    gradient_error,
    is_mode,
)
from tests.bench.table import Row, figures, render, write_rows

BENCH = "step_time"
HEADERS = (
    *("tokens", "mode", "layers", "step s", "over keep_all", "over full"),
    *("peak GB", "reserved GB", "host GB", "gradients"),
)
BYTES = ("peak_allocated_bytes", "peak_reserved_bytes", "host_bytes")
LAYERS = {8192: 16, 32768: 8, 65536: 8, 131072: 4}
TARGETS = {8192: 1.10, 32768: 1.03, 65536: 1.015, 131072: 1.01}
SLOW_MODES = ("save_on_cpu", "deepspeed")
TOLERANCE = {"cuda": 0.05, "cpu": 1e-3}  # relative, of bf16 and fp32 gradients
Results = dict[tuple[Case, str], dict[str, Any]]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line, and fill in the device's defaults."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench.{BENCH}", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", help="lengths of the sequence [cuda: 8192 32768 65536 131072; cpu: 512 2048]")
    add("--layers", type=int, nargs="+", help="decoder layers: one number, or one per length [cuda: 16 8 8 4; cpu: 4]")
    add(
        "--modes",
        nargs="+",
        help=f"of {' '.join(MODES)} [all these; see above], memplug:ALPHA, memplug_torch, reentrant, flag, wrapper, "
        f"memplug_over:MODE where MODE is one of {' '.join(CHECKPOINTS)}",
    )
    add(
        "--host",
        choices=HOSTS,
        default=HOSTS[0],
        help="origin of the layers; Megatron-Core's come with its own recomputation",
    )
    add("--model", choices=MODELS, help="shape of a layer, from configs/models [cuda: 7b; cpu: tiny]")
    add("--attention", choices=ATTENTION, default="cudnn", help="back end of attention on cuda [cudnn]")
    add("--steps", type=int, help="timed steps a round [5; 3 beyond 32768 tokens]")
    add("--rounds", type=int, help="how often the modes take turns [cuda: 1; cpu: 2]")
    add("--min-offload-bytes", type=int, help="of the memplug block [cuda: 1 MiB; cpu: 64 KiB, as tensors are small]")
    add("--device", help="cuda, cpu, virtual [cuda where there is one]")
    add("--gpu", default="h200", help="the virtual device's GPU: a file of configs/hardware [h200]")
    add(
        "--budget",
        type=float,
        metavar="B",
        help="memplug's budget over the memory that `full` reserves [all of the device]",
    )
    add("--json", type=Path, metavar="FILE", help="write the rows here")
    args = parser.parse_args(argv)
    if args.budget is not None and (args.device == "cpu" or (args.modes and "full" not in args.modes)):
        parser.error(
            "--budget is relative to `full` on a device that counts reserved memory: --modes must name `full` first"
        )
    unknown = [mode for mode in args.modes or () if not is_mode(mode)]
    if unknown:
        parser.error(f"unknown mode {unknown[0]}")
    modes = OWN_MODES.get(args.host, (*MODES, *CHECKPOINTS))
    foreign = [mode for mode in args.modes or () if mode.partition(":")[0] not in (*modes, *OWN)]
    if foreign:
        parser.error(f"the mode {foreign[0]} does not work with these layers: {' '.join(modes)}")
    if args.host in OWN_MODES:
        args.modes = args.modes or list(modes)
    if args.device is None:
        import torch

        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    cuda = args.device != "cpu"
    args.gpu = args.gpu if args.device == "virtual" else ""
    args.model = args.model or ("7b" if cuda else "tiny")
    args.tokens = args.tokens or ([8192, 32768, 65536, 131072] if cuda else [512, 2048])
    args.layers = args.layers or ([LAYERS.get(tokens, 4) for tokens in args.tokens] if cuda else [4])
    if len(args.layers) == 1:
        args.layers *= len(args.tokens)
    if len(args.layers) != len(args.tokens):
        parser.error("--layers takes one number, or one per length of --tokens")
    args.rounds = args.rounds or (1 if cuda else 2)
    if args.min_offload_bytes is None:
        args.min_offload_bytes = 1 << 20 if cuda else 64 << 10
    return args


def plan_of(args: argparse.Namespace) -> list[tuple[Case, list[str], int]]:
    """Return each case with its modes and its number of timed steps, in the order in which they run."""
    plan = []
    for tokens, layers in zip(args.tokens, args.layers, strict=True):
        case = Case(
            *(tokens, layers, args.model, args.device, args.attention, args.min_offload_bytes, args.host, args.gpu)
        )
        short = case.is_virtual or (args.device != "cpu" and tokens != 32768)
        modes = args.modes or [mode for mode in MODES if not (short and mode in SLOW_MODES)]
        plan.append((case, list(modes), args.steps or (3 if tokens > 32768 else 5)))
    return plan


def extrapolate(fewer: tuple[int, float], more: tuple[int, float], layers: int) -> float:
    """Return the value at `layers` of the line through two (layers, value) points."""
    slope = (more[1] - fewer[1]) / (more[0] - fewer[0])
    return fewer[1] + slope * (layers - fewer[0])


def measure(workers: dict[str, worker.Worker], case: Case, mode: str, steps: int) -> dict[str, Any]:
    """Measure one mode of one case; if `keep_all` does not fit, extrapolate it from fewer layers."""
    result = workers[mode].measure(case, steps)
    fewer, more = case.layers // 4, case.layers // 2
    if result["outcome"] != worker.OUT_OF_MEMORY or mode != "keep_all" or not 0 < fewer < more:
        return result
    smaller = [dataclasses.replace(case, layers=layers) for layers in (fewer, more)]
    points = {one.layers: workers[mode].measure(one, steps) for one in smaller}
    if any(point["outcome"] != "ok" for point in points.values()):
        return result
    result = {**points[more], "extrapolated_from": more, "gradients": None}
    for key in ("step_s", "peak_allocated_bytes", "peak_reserved_bytes"):
        if result[key] is not None:
            result[key] = extrapolate((fewer, points[fewer][key]), (more, points[more][key]), case.layers)
    return result


def with_budget(case: Case, mode: str, share: float | None, full: list[dict[str, Any]]) -> Case:
    """Return the case with memplug's budget: a share of the bytes that `full` reserved the last time."""
    if share is None or not mode.startswith("memplug"):
        return case
    return dataclasses.replace(case, budget_bytes=int(share * full[-1]["peak_reserved_bytes"]))


def run(plan: list[tuple[Case, list[str], int]], rounds: int, budget: float | None = None) -> Results:
    """Run all cases, the modes of each in turn, and return medians over the rounds."""
    workers = {mode: worker.Worker(f"tests.bench.{BENCH}", mode) for _, modes, _ in plan for mode in modes}
    found: dict[tuple[Case, str], list[dict[str, Any]]] = {}
    try:
        for one in workers.values():
            one.start()
        for turn in range(rounds):
            for case, modes, steps in plan:
                for mode in modes:
                    full = found.get((case, "full"), [])
                    if budget is not None and mode.startswith("memplug") and (not full or full[-1]["outcome"] != "ok"):
                        result = {"outcome": "no budget: `full` did not run before"}
                    else:
                        result = measure(workers, with_budget(case, mode, budget, full), mode, steps)
                    found.setdefault((case, mode), []).append(result)
                    told = f"{result['step_s']:.4f} s" if result["outcome"] == "ok" else result["outcome"]
                    print(f"{BENCH}: round {turn + 1} of {rounds}: {case}: {mode}: {told}", file=sys.stderr, flush=True)
    finally:
        for one in workers.values():
            one.stop()
    return {key: _median(results) for key, results in found.items()}


def _median(results: list[dict[str, Any]]) -> dict[str, Any]:
    failed = next((result for result in results if result["outcome"] != "ok"), None)
    if failed is not None:
        return failed
    known = [key for key in ("step_s", *BYTES) if results[0][key] is not None]
    medians = {key: statistics.median(result[key] for result in results) for key in known}
    return {**results[-1], **medians, "steps": sum(result["steps"] for result in results)}


def compare(results: Results) -> None:
    """Add ratios to `keep_all` and `full`, and the difference from `keep_all`'s gradients, or else from `full`'s."""
    for (case, _), result in results.items():
        if result["outcome"] != "ok":
            continue
        others = {mode: results.get((case, mode), {"outcome": "not run"}) for mode in ("keep_all", "full")}
        for mode, other in others.items():
            if other["outcome"] == "ok":
                result[f"over_{mode}"] = result["step_s"] / other["step_s"]
        reference = next((other["gradients"] for other in others.values() if other.get("gradients")), None)
        if reference is not None and result["gradients"] is not None:
            result["gradient_error"] = gradient_error(result["gradients"], reference)
            result["gradients_ok"] = result["gradient_error"] <= TOLERANCE[case.device.partition(":")[0]]


METRICS = {
    "step_s": "s",
    "over_keep_all": "1",
    "over_full": "1",
    "peak_allocated_bytes": "bytes",
    "peak_reserved_bytes": "bytes",
    "host_bytes": "bytes",
    "arena_bytes": "bytes",
    "reserved_unused_bytes": "bytes",
    "gradient_error": "1",
    "gradients_ok": "1",
    "extrapolated_from": "layers",
}


def rows_of(results: Results) -> list[Row]:
    """Return one row per number; "outcome" says "ok", "out of memory" or names the failure."""
    rows = []
    for (case, mode), result in results.items():
        n = result.get("steps", 0)
        rows.append(Row(BENCH, str(case), mode, "outcome", "text", result["outcome"], n))
        for key, unit in METRICS.items():
            if result.get(key) is not None:
                rows.append(Row(BENCH, str(case), mode, key, unit, float(result[key]), n))
    return rows


def table_of(results: Results) -> str:
    """Return the table, and notes on the targets."""
    lines, notes = [], []
    for (case, mode), result in results.items():
        head = (f"{case.tokens:,}", mode + ("*" if "extrapolated_from" in result else ""), str(case.layers))
        if result["outcome"] != "ok":
            lines.append((*head, *["-"] * 6, result["outcome"]))
            continue
        gigabytes = [None if result[key] is None else result[key] / 1e9 for key in BYTES]
        ratios = [figures(result.get(key)) for key in ("over_keep_all", "over_full")]
        checked = {True: "ok", False: "DIFFERS", None: "-"}[result.get("gradients_ok")]
        lines.append((*head, figures(result["step_s"]), *ratios, *map(figures, gigabytes), checked))
        full = results.get((case, "full"), {"outcome": "not run"})
        if mode.startswith("memplug") and full["outcome"] == "ok":
            peak = result["peak_allocated_bytes"] / full["peak_allocated_bytes"]
            target = f", target {TARGETS[case.tokens]}" if case.tokens in TARGETS and case.model == "7b" else ""
            over = f"{ratios[0]} over keep_all{target}"
            notes.append(f"{case}: {mode}: {over}; peak {peak:.3f} of full's, target at most 1")
    return "\n".join([render(HEADERS, lines), "", *notes])


def main(argv: list[str] | None = None) -> int:
    """Run, print the table and write the rows; return 1 if a mode failed or gradients differ."""
    args = parse_args(argv)
    results = run(plan_of(args), args.rounds, args.budget)
    compare(results)
    print(table_of(results))
    if args.json:
        write_rows(args.json, rows_of(results))
    failed = any(result["outcome"] not in ("ok", worker.OUT_OF_MEMORY) for result in results.values())
    return int(failed or any(result.get("gradients_ok") is False for result in results.values()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        worker.serve(sys.argv[2])
    else:
        sys.exit(main())
