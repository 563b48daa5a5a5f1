"""Gives each mode a process, with an allocator, pinned memory and out-of-memory errors of its own.

A worker reads a case as a line of JSON, measures the case, releases all memory, and answers with a line of JSON. So a
process is started only once for all of a mode's cases, although the modes of each case run in turn.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import logging
import os
import statistics
import subprocess
import sys
import traceback
from typing import Any

from tests.bench.cases import Case

OUT_OF_MEMORY = "out of memory"


class Worker:
    """The parent's end of a process that measures one mode.

    The process is started at the first case, and again after the process died.
    """

    def __init__(self, module: str, mode: str):
        self.command = [sys.executable, "-m", module, "--child", mode]
        self.process: subprocess.Popen[str] | None = None

    def measure(self, case: Case, steps: int) -> dict[str, Any]:
        """Return the result of the child's `measure`, or `{"outcome": ...}` with "out of memory" or the error."""
        process = self.start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps({**dataclasses.asdict(case), "steps": steps}) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer:
            return json.loads(answer)
        code = process.wait()
        self.process = None
        killed = code == -9  # Linux kills the process that takes the last of the host's memory
        return {"outcome": OUT_OF_MEMORY if killed else f"exited with {code}"}

    def start(self) -> subprocess.Popen[str]:
        """Return the process, started if it does not run."""
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self.process

    def stop(self) -> None:
        """End the process and wait for it."""
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()
            self.process = None


def serve(mode: str) -> None:
    """Run as the child: answer cases until standard input ends or a case fails, which may leave memory behind."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries' output must not mix with answers
    logging.getLogger("memplug").setLevel(logging.ERROR)
    importlib.import_module("tests.bench.modes")  # slow: all children import at the same time, before the first case
    for line in sys.stdin:
        request = json.loads(line)
        answer = _attempt(mode, request)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if answer["outcome"] != "ok":
            return


def _attempt(mode: str, request: dict[str, Any]) -> dict[str, Any]:
    steps = request.pop("steps")
    try:
        return measure(mode, Case(**request), steps)
    except Exception as error:  # any error is this mode's row
        text = str(error).lower()
        if isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text:
            return {"outcome": OUT_OF_MEMORY}
        traceback.print_exc()
        return {"outcome": f"{type(error).__name__}: {error}"}


def measure(mode: str, case: Case, steps: int) -> dict[str, Any]:
    """Time `steps` steps after warm-up; measure peak memory, host memory in the pinned pool, and gradients.

    Returns:
        outcome "ok", step_s, steps, peak_allocated_bytes, peak_reserved_bytes (None on the CPU), host_bytes (None if
            the mode has no pinned memory), arena_bytes (None without a session), reserved_unused_bytes (after the last
            step, in segments of torch's allocator that hold tensors; None except on CUDA), gradients (None on the
            virtual device).
    """
    from tests.bench import measuring, modes

    on = measuring.of(case)
    with modes.prepared(mode, case) as run:
        for _ in range(run.warm_up):
            run.clear_gradients()
            run.step()
        on.reset_peaks()
        times = []
        for _ in range(steps):
            run.clear_gradients()
            times.append(on.seconds(run))
        run.clear_gradients()
        peak, reserved = on.peaks(run)
        unused = on.unused()
        result = {
            "outcome": "ok",
            "step_s": statistics.median(times),
            "steps": steps,
            "peak_allocated_bytes": peak,
            "peak_reserved_bytes": reserved,
            "host_bytes": _host_bytes(run, mode, case),
            "arena_bytes": run.session.report().arena.bytes if run.session is not None else None,
            "reserved_unused_bytes": unused,
            "gradients": None if case.is_virtual else run.gradients(),
        }
        if run.session is not None:
            told = {key: value for key, value in run.session.report().as_dict().items() if value not in (None, 0, [])}
            print(f"{case}: {mode}: {result['step_s']} s: {json.dumps(told)}", file=sys.stderr, flush=True)
    del run
    gc.collect()
    on.free()
    return result


def _host_bytes(run: Any, mode: str, case: Case) -> int | None:
    import torch

    if run.session is not None:
        return run.session.report().tokenwise.host_pool_bytes
    if case.device.startswith("cuda") and mode == "save_on_cpu" and hasattr(torch.cuda, "host_memory_stats"):
        return torch.cuda.host_memory_stats().get("allocated_bytes.peak")
    return None
