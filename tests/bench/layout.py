"""Compares the planners' addresses for a step: `python -m tests.bench.layout`.

Recorded steps, synthetic ones (tests/support/schedules.py) and public instances of dynamic storage allocation are
placed by each planner and, as the baseline, by a simulation of torch's caching allocator with and without expandable
segments. Each of these runs in a process of its own; "MiB" is that process's peak, Python, numpy and scipy included.
Dynamic requests of a step (the experts') are left out, for the baseline too.

Tried and dropped: OR-Tools' CP-SAT as the search behind `exact` (3 to 28 s on MiniMalloc's A, C and E at their
capacity, where memplug's own search took 0.05 to 3 s; CP-SAT stays as a backend); MEMO's mixed integer program (does
not end at 80 buffers; it stays as the reference); a last pass of `bilevel` that lowers every buffer (changed nothing;
`spatiotemporal` gains most of its quality by such a pass: 1.17 without it on llama7b_ckpt); ordering buffers of equal
size by lifetime alone (1.033 instead of 1.008 on idealloc's pangu, 18,692 buffers; both orders are tried now); raising
the priority of buffers that end too high instead of moving them to the front.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from memplug import planners
from memplug.arena.plan.problem import Problem
from memplug.profile.trace import Trace
from tests.bench.table import Row, figures, render, write_rows
from tests.support.folders import DATA, ROOT
from tests.support.schedules import SCHEDULES, record

BENCH = "layout"
BASELINES = ("caching", "expandable")
PLANNERS = planners.names()
RECORDED = tuple(path.stem for path in sorted(DATA.glob("*.npz")))
INSTANCES = tuple(path.name for path in sorted((DATA / "dsa").glob("*.csv")))
QUICK = ("llama7b_long_ckpt", "minimalloc_C.1048576.csv")
EXACT_AT_MOST = 2_000


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line: which cases to place, and where to write."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench.{BENCH}", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", metavar="CASE", help=f"of {', '.join(cases())}; or CSV files [all]")
    parser.add_argument("--time-limit", type=float, default=10.0, metavar="S", help="for each planner [10]")
    parser.add_argument("--repetitions", type=int, default=1, help="[1]")
    parser.add_argument("--quick", action="store_true", help=f"only {' and '.join(QUICK)}, and 2 s for each planner")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    parser.add_argument("--worker", nargs=2, metavar=("CASE", "MODE"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def cases() -> tuple[str, ...]:
    """Return the names of all cases: recorded steps, synthetic ones, instances."""
    return (*RECORDED, *SCHEDULES, *INSTANCES)


def step_of(case: str) -> Trace | None:
    """Return the step of that name, or None if it is an instance."""
    from memplug.arena.plan.from_trace import last_step
    from memplug.profile.trace_file import load

    if case in SCHEDULES:
        return record(SCHEDULES[case])
    return last_step(load(DATA / f"{case}.npz")) if case in RECORDED else None


def problem_of(case: str) -> Problem:
    """Return the requests of that case."""
    from memplug.arena.plan import from_trace
    from memplug.arena.plan.problem_file import read_csv

    step = step_of(case)
    if step is not None:
        return from_trace.problem_of(step)
    return read_csv(DATA / "dsa" / case if case in INSTANCES else Path(case))


def measure(case: str, mode: str, time_limit_s: float) -> dict[str, float | str]:
    """Run a planner once, and return its figures.

    Returns:
        Height over lower bound, seconds, the judge's verdict, the peak of this process in bytes, and the number of
            requests.
    """
    from memplug.arena.judge import judge
    from memplug.arena.plan import auto

    problem = problem_of(case)
    began = time.perf_counter()
    if mode in BASELINES:
        height, verdict = _reserved(problem, expandable=mode == "expandable"), "-"
    else:
        solution = auto.plan(problem, mode, time_limit_s=time_limit_s)
        height = solution.height
        verdict = "refused" if judge(problem, solution) else "optimal" if solution.optimal else "accepted"
    return {
        "height over lower bound": height / problem.lower_bound,
        "seconds": time.perf_counter() - began,
        "peak": _peak_bytes(),
        "judge": verdict,
        "requests": len(problem),
    }


def _peak_bytes() -> int:
    """Return the peak memory of this process in bytes; `getrusage` would include the peak of the parent process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _reserved(problem: Problem, *, expandable: bool) -> int:
    """Return the bytes that the caching allocator would reserve for the same mallocs and frees, in their order."""
    from tests.bench.caching_allocator import reserved

    return reserved(_events(problem), expandable=expandable)[0]


def _events(problem: Problem) -> np.ndarray:
    """Return rows of (kind, request, bytes, stream) by time; frees come before mallocs of the same instant."""
    from memplug.profile.trace import EventKind

    table, count = problem.buffers, len(problem)
    kinds = np.repeat([EventKind.MALLOC, EventKind.FREE], count)
    order = np.lexsort((kinds == EventKind.MALLOC, np.concatenate([table["lower"], table["upper"]])))
    columns = (kinds, np.tile(np.arange(count), 2), np.tile(table["size"], 2), np.tile(table["stream"], 2))
    return np.stack([column[order] for column in columns], axis=1)


def run(case: str, mode: str, time_limit_s: float) -> dict[str, float | str]:
    """Run `measure` in a process of its own."""
    command = [sys.executable, "-m", f"tests.bench.{BENCH}", "--worker", case, mode, "--time-limit", str(time_limit_s)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{case} by {mode} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def rows_of(case: str, mode: str, runs: list[dict[str, float | str]]) -> list[Row]:
    """Return rows with medians."""
    units = {"height over lower bound": "1", "seconds": "s", "peak": "bytes", "judge": "text", "requests": "1"}
    found = []
    for metric, unit in units.items():
        values = [each[metric] for each in runs]
        value = values[0] if unit == "text" else statistics.median(values)
        found.append(Row(BENCH, case, mode, metric, unit, value, len(values)))
    return found


def table(rows: list[Row]) -> str:
    """Return the table, with a line for each case and mode."""
    found: dict[tuple[str, str], dict[str, float | str]] = {}
    for row in rows:
        found.setdefault((row.case, row.mode), {})[row.metric] = row.value
    headers = ("case", "requests", "planner", "height / lower bound", "seconds", "MiB", "judge")
    lines = [
        (
            case,
            f"{int(values['requests']):,}",
            mode,
            f"{values['height over lower bound']:.5f}",
            figures(values["seconds"], 3),
            f"{values['peak'] / 2**20:,.0f}",
            str(values["judge"]),
        )
        for (case, mode), values in found.items()
    ]
    return render(headers, lines, left=0)


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark, or a worker of it."""
    args = parse_args(argv)
    if args.worker:
        print(json.dumps(measure(*args.worker, args.time_limit)))
        return
    chosen = QUICK if args.quick else args.cases or cases()
    limit_s = min(args.time_limit, 2.0) if args.quick else args.time_limit
    rows = []
    for case in chosen:
        for mode in (*BASELINES, *PLANNERS):
            if mode == "exact" and len(problem_of(case)) > EXACT_AT_MOST:
                continue
            runs = [run(case, mode, limit_s) for _ in range(args.repetitions)]
            rows += rows_of(case, mode, runs)
            print(f"{case} {mode}: {runs[0]['height over lower bound']:.5f}", file=sys.stderr)
    print(table(rows))
    if args.json:
        write_rows(args.json, rows)


if __name__ == "__main__":
    main()
