"""Support for tests of the recorder: recorded steps, the same steps seen by torch's profiler, other processes."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._C._profiler import RecordScope, _EventType, _ExperimentalConfig
from torch.profiler import ProfilerActivity

from memplug import native
from memplug.profile.recorder import Detail, Recorder, _release
from memplug.profile.trace import Fingerprint, Layer, Trace
from tests.support.folders import ROOT

LIBRARIES = Path(torch.__file__).parent / "lib"


def record(
    recorder: Recorder, step: Callable[[], Any], detail: Detail = Detail.REQUESTS, layers: Sequence[Layer] = ()
) -> Trace:
    """Run a call, and return its trace."""
    recorder.begin(detail)
    step()
    return recorder.end(Fingerprint(), layers)


def sequence(recorder: Recorder, step: Callable[[], Any]) -> list[str]:
    """Run a call, and return the names of its operators."""
    recorder.take()
    step()
    names = recorder.names
    return [names[number] for number in recorder.take()]


def operator_names(trace: Trace) -> list[str]:
    """Return the names of a trace's operators in program order."""
    return [trace.names[name] for name in trace.operators["name"]]


def without_accumulation(names: list[str]) -> list[str]:
    """Drop the operators that only a first gradient runs: parameters of `trainer` have no gradients before a step."""
    return [name for name in names if name != "aten::detach"]


def request_sizes(trace: Trace) -> list[int]:
    """Return the bytes of every malloc, and negative bytes of every free."""
    return np.diff(trace.live_bytes, prepend=trace.base_bytes).tolist()


def profiled(step: Callable[[], Any]) -> torch.profiler.profile:
    """Run a call under torch's profiler, and return the profile."""
    config = _ExperimentalConfig(capture_overload_names=True)
    with torch.profiler.profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, experimental_config=config
    ) as profile:
        step()
    return profile


def profiled_operators(step: Callable[[], Any]) -> list[str]:
    """Return the same as `sequence`, from torch's profiler.

    Labels, such as autograd's, are left out: their names are in no namespace.
    """
    events = [event for event in _events(profiled(step)) if event.tag == _EventType.TorchOp and "::" in event.name]
    events = [event for event in events if event.typed[1].scope == RecordScope.FUNCTION]
    events = [event for event in events if not event.name.startswith("autograd::")]
    return [event.name + (f".{event.overload_name}" if event.overload_name else "") for event in events]


def profiled_requests(step: Callable[[], Any]) -> list[int]:
    """Return the same as `request_sizes`, from torch's profiler."""
    return [event.typed[1].alloc_size for event in _events(profiled(step)) if event.tag == _EventType.Allocation]


def _events(profile: torch.profiler.profile) -> list[Any]:
    """Return the events of one thread, ordered by their start."""
    found, ahead = [], list(reversed(profile.profiler.kineto_results.experimental_event_tree()))
    while ahead:
        event = ahead.pop()
        found.append(event)
        ahead += reversed(event.children)
    return found


def trainer(layers: int = 2, rows: int = 4, optimizes: bool = True) -> Callable[[], None]:
    """Return a training step of a small stack, with or without the optimizer's step.

    One step has run already.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU()) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(rows, 8)

    def step() -> None:
        model(x).square().mean().backward()
        if optimizes:
            optimizer.step()
        optimizer.zero_grad()

    step()
    return step


def in_thread(call: Callable[[], Any]) -> None:
    """Run a call to its end on another Python thread, and raise what it raises."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in errors:
        raise error


class Nested(torch.autograd.Function):
    """A function whose backward runs another such backward, and so on; the innermost one calls `innermost`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int, innermost: Callable[[], Any]) -> torch.Tensor:
        ctx.depth, ctx.innermost = depth, innermost
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.depth:
            nested(ctx.depth - 1, ctx.innermost).backward()
        else:
            ctx.innermost()
        return gradient, None, None


def nested(depth: int, innermost: Callable[[], Any]) -> torch.Tensor:
    with torch.enable_grad():
        return Nested.apply(torch.ones(1, requires_grad=True), depth, innermost)


# -- the recorder's traces in a process --------------------------------------------------------------------------------


def callbacks() -> bool:
    """Return whether torch has any global callback around operators; torch's Python has no function for this."""
    ask = ctypes.CDLL(str(LIBRARIES / "libtorch_cpu.so"))._ZN2at18hasGlobalCallbacksEv
    ask.restype = ctypes.c_bool
    return ask()


def cpu_allocator() -> int:
    """Return the address of the CPU's current allocator."""
    ask = ctypes.CDLL(str(LIBRARIES / "libc10.so"))._ZN3c1015GetCPUAllocatorEv
    ask.restype = ctypes.c_void_p
    return ask()


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Assert that torch ends the test with the callbacks and the allocator that it began with."""
    before = callbacks(), cpu_allocator()
    yield
    after = callbacks(), cpu_allocator()
    _release(native.load(), "cpu")  # so that the next test does not fail if this one did
    assert after == before


@pytest.fixture
def recorder(nothing_left: None) -> Iterator[Recorder]:
    """Yield the process's recorder, for the CPU, and stop it after the test."""
    made = Recorder("cpu")
    yield made
    made.stop()


# -- other processes ---------------------------------------------------------------------------------------------------

PREAMBLE = """
import gc, os, sys, threading
import torch
from memplug import native
from memplug.profile.recorder import Detail, Recorder
from memplug.profile.trace import Fingerprint
from tests.support.recording import callbacks, cpu_allocator, record, sequence, trainer, without_accumulation

allocator = cpu_allocator()
"""


def run_python(script: str, *, code: int = 0, env: dict[str, str] | None = None, time_limit_s: float = 900) -> str:
    """Run a script in a process of its own, after `PREAMBLE`, and return its output.

    Raises:
        AssertionError: the exit code is not `code`, or the output tells of a crash.
    """
    process = start_python(script, env)
    try:
        output, _ = process.communicate(timeout=time_limit_s)
    finally:
        process.kill()
    assert process.returncode == code, f"exit code {process.returncode}:\n{output}"
    for word in ("terminate called", "Segmentation", "Fatal Python error", "core dumped", "Exception ignored"):
        assert word not in output, output
    return output


def start_python(script: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a script as `run_python` does, without waiting for it."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", PREAMBLE + textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
