"""Measures one training of a mixture of experts on this rank.

Started by a launcher: `python -m tests.bench.experts_worker FOLDER CASE`. `CASE` is a JSON object: "model", "experts",
"way", "micro_batches" as in tests/bench/experts.py, and its options "layers", "hidden", "tokens", "steps", "recorded",
"rounds" and "block". `FOLDER/RANK.json` gets the figures of this rank.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import memplug
from memplug.arena.arena import Counters
from memplug.arena.plan.from_trace import last_step
from memplug.profile.trace import EventKind, Trace
from tests.bench.caching_allocator import reserved
from tests.bench.experts_trainings import Sizes, Training, training_of

SMALLEST = {"min_offload_bytes": 1024}
WAYS: dict[str, dict[str, Any]] = {
    "kept": {"enabled": False},
    "token-wise": {"enabled": True, **SMALLEST},
    "recomputed": {"enabled": True, "alpha": 0.0, **SMALLEST},
}
ENOUGH = 0.97  # served; below it, what torch's allocator reserves beside the arena is not known well enough
WARM_UP = 24  # steps until plans of a new session are in force


def block_of(way: str, arena: bool) -> dict[str, Any]:
    """Return the "memplug" block of a way to train."""
    return {
        "enabled": True,
        "plan_dir": False,
        "profiler": {"wait_for_plans": True},
        "tokenwise": WAYS[way],
        "arena": {"enabled": arena},
    }


def measure(training: Training, case: dict[str, Any]) -> dict[str, float | None]:
    """Return the figures of a training on this rank."""
    steps: list[Counters] = []
    traces: list[Trace] = []
    with memplug.attach(training.target, block_of(case["way"], arena=True)) as session:
        for number in range(case["steps"] + case["recorded"]):
            if number >= case["steps"]:
                session.record()
            training.step(session)
            arena = session._attached.boundary.followers.find("arena")
            if arena is not None:
                steps.append(arena.step)
            if session.trace is not None and (not traces or session.trace is not traces[-1]):
                traces.append(session.trace)
        report = session.report().arena
    later = steps[len(steps) // 2 :]
    served = sum(step.planned_bytes + step.dynamic_bytes + step.reusable_bytes for step in later)
    left = [step.fallback_bytes for step in later]
    share = served / max(1, served + sum(left))
    most, beside = report.peak_bytes, max(left)  # the arena's peak is of all steps since the last plan
    requests = requests_of([last_step(trace) for trace in traces])
    (native, live), (expandable, _) = (reserved(requests, expandable=how, times=1) for how in (False, True))
    return {
        "varying": sum(step.dynamic_bytes + step.dynamic_missed_bytes for step in later) / max(1, served + sum(left)),
        "served": share,
        "plans": report.plans,
        "grown": report.amendments,
        "live_bytes": live,
        "largest_bytes": int(requests[:, 2].max()),
        "most_bytes": max(most, live),
        "arena_bytes": report.bytes,
        "beside_bytes": beside,
        "efficiency": max(most, live) / (report.bytes + beside) if share >= ENOUGH else None,
        "native": live / native,
        "expandable": live / expandable,
        "cpu_time": cpu_time(training, case),
    }


def cpu_time(training: Training, case: dict[str, Any]) -> float | None:
    """Return the median CPU time of a step served by the arena over one served by torch's allocator, by turns.

    None: nothing was timed, or the arena did not serve yet.
    """
    seconds: dict[bool, list[float]] = {True: [], False: []}
    late = False
    for _ in range(case["rounds"]):
        for arena in (True, False):
            session = None
            if arena or WAYS[case["way"]]["enabled"]:
                session = memplug.attach(training.target, block_of(case["way"], arena))
            for number in range(WARM_UP + case["block"]):
                begin = time.process_time()
                training.step(session)
                if number >= WARM_UP:
                    seconds[arena].append(time.process_time() - begin)
            if session is not None:
                late = late or (arena and session.report().arena.state != "serving")
                session.detach()
    if late or not seconds[True]:
        return None
    return statistics.median(seconds[True]) / statistics.median(seconds[False])


def requests_of(steps: list[Trace]) -> np.ndarray:
    """Return the requests of some steps, one after another, for the simulation. int64[k, 4].

    What a step leaves in use is freed as it ends.
    """
    rows, first = [], 0
    for step in steps:
        live: dict[int, int] = {}
        for kind, request, nbytes, stream in step.events[["kind", "request", "nbytes", "stream"]].tolist():
            if kind == EventKind.MALLOC and nbytes > 0:
                live[request] = stream
                rows.append((kind, first + request, nbytes, stream))
            elif kind == EventKind.FREE and request in live:
                rows.append((kind, first + request, 0, live.pop(request)))
        rows += [(int(EventKind.FREE), first + request, 0, stream) for request, stream in live.items()]
        first += len(step.requests)
    return np.array(rows, np.int64)


def prepare(model: str, experts: str) -> None:
    """Join the other ranks, if the model's framework has any."""
    if model == "deepspeed":
        import deepspeed

        # DeepSpeed would first compile a shared-memory all-reduce, which takes half a minute
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("gloo")
    elif model.startswith("megatron"):
        from tests.support import megatron_worker, stand_in

        if experts == "grouped":
            stand_in.use()
        megatron_worker.prepare()
        if experts == "grouped":
            stand_in.transformer_engine_layers()
        dist.init_process_group("gloo")


def main() -> None:
    """Measure the case, and write the figures."""
    folder, case = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    prepare(case["model"], case["experts"])
    sizes = Sizes(case["layers"], case["hidden"], case["tokens"])
    found = measure(training_of(case["model"], case["experts"], case["micro_batches"], sizes), case)
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # back ends of collectives may still have threads, which may fail while Python ends


if __name__ == "__main__":
    main()
