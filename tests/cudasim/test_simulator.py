"""The simulated device behaves like CUDA: numbers, order, memory, copies, statistics, graphs."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest
import torch

from tests.cudasim import device
from tests.cudasim.device import SCHEDULES, Schedule, scheduled
from tests.support.folders import ROOT
from tests.support.serving import llama

pytestmark = pytest.mark.gpu

ORDERS = [*SCHEDULES, *(Schedule("random", seed) for seed in range(3))]
MIB = 1 << 20


def train(where: str, dtype: torch.dtype = torch.float32) -> list[float]:
    """Return losses of a tiny Llama; without dropout, because the devices draw different random numbers."""
    torch.manual_seed(0)
    model = llama().to(where, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(4):
        tokens = torch.randint(0, 64, (2, 16), generator=generator).to(where, non_blocking=True)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiny_llama_trains_as_on_the_cpu_under_every_schedule(dtype: torch.dtype) -> None:
    runs = []
    for schedule in ORDERS:
        with scheduled(schedule):
            runs.append(train("cuda", dtype))
    assert runs[0] == pytest.approx(train("cpu", dtype), rel=1e-5 if dtype is torch.float32 else 1e-3)
    assert all(run == runs[0] for run in runs), "to the bit"


@pytest.mark.unordered
@pytest.mark.parametrize("schedule", ORDERS, ids=str)
def test_detector_finds_missing_wait_under_every_schedule(schedule: Schedule) -> None:
    side = torch.cuda.Stream()
    with scheduled(schedule):
        before = device.violations()
        made = torch.full((1000,), 2.0, device="cuda")
        with torch.cuda.stream(side):
            copy = made * 3  # without a wait for `made`
        torch.cuda.synchronize()
        assert device.violations() > before
        side.wait_stream(torch.cuda.current_stream())
        before = device.violations()
        with torch.cuda.stream(side):
            again = made * 3
        torch.cuda.synchronize()
        assert device.violations() == before and again.unique().tolist() == [6.0]
        del copy


@pytest.mark.unordered
def test_missing_wait_gives_wrong_numbers_under_copyfirst() -> None:
    results = {}
    for schedule in (Schedule("eager"), Schedule("copyfirst")):
        side = torch.cuda.Stream()
        with scheduled(schedule):
            made = torch.empty(1000, device="cuda").fill_(2.0)
            with torch.cuda.stream(side):
                copy = made * 3
            torch.cuda.synchronize()
            results[schedule.policy] = copy.cpu()
    assert results["eager"].unique().tolist() == [6.0]
    assert results["copyfirst"].unique().tolist() != [6.0], "it reads memory that has not been written"


def test_memory_is_limited_to_capacity_and_reusable_after_free() -> None:
    torch.cuda.empty_cache()
    with device.memory_of(device.memory_used_bytes() + 64 * MIB):
        kept = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
        del kept
        torch.empty(60 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()


def test_host_memory_registration_fails_beyond_the_limit_or_if_repeated() -> None:
    host, cudart, before = torch.zeros(MIB, dtype=torch.uint8), torch.cuda.cudart(), device.registered()
    with device.pinned_memory_of(0):
        assert int(cudart.cudaHostRegister(host.data_ptr(), MIB, 0)) == 2, "out of memory"
    assert int(cudart.cudaHostRegister(host.data_ptr(), MIB, 0)) == 0 and device.registered() == before + 1
    assert int(cudart.cudaHostRegister(host.data_ptr(), MIB, 0)) == 712, "registered already"
    assert int(cudart.cudaHostUnregister(host.data_ptr())) == 0 and device.registered() == before
    with pytest.raises(RuntimeError):
        torch.zeros(1, device="cuda")  # the next launch reports the last error, even of another call
    assert torch.zeros(1, device="cuda").item() == 0


def test_copies_to_pageable_but_not_to_pinned_memory_block_the_host() -> None:
    with scheduled(Schedule("lazy")):
        source = torch.full((1000,), 5.0, device="cuda")
        pinned, pageable = torch.zeros(1000, pin_memory=True), torch.zeros(1000)
        before = device.blocked()
        pinned.copy_(source, non_blocking=True)
        assert device.blocked() == before and device.pending() > 0 and pinned.sum() == 0, "not yet"
        pageable.copy_(source, non_blocking=True)
        assert device.blocked() > before and pageable.unique().tolist() == [5.0]
        torch.cuda.synchronize()
        assert pinned.unique().tolist() == [5.0]


LAUNCH = """
import ctypes, torch
torch.zeros(1, device="cuda")
runtime = ctypes.CDLL(None)
runtime.__getattr__("__cudaRegisterFunction")(None, ctypes.c_void_p(64), None, b"planted_kernel", 0, *[None] * 5)
runtime.cudaLaunchKernel(ctypes.c_void_p(64), *[ctypes.c_ulonglong(0)] * 6)
"""


def test_unsimulated_kernel_aborts_with_its_name() -> None:
    done = subprocess.run([sys.executable, "-c", LAUNCH], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == -6 and "not simulated was launched: planted_kernel" in done.stderr, done.stderr[-2000:]


def test_torchs_memory_statistics_count_simulated_memory() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    block = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() - before == 3 * MIB
    del block
    assert torch.cuda.memory_allocated() == before and torch.cuda.max_memory_allocated() == before + 3 * MIB


def test_events_measure_copies_at_link_speed() -> None:
    source, target = torch.zeros(64 * MIB, dtype=torch.uint8, pin_memory=True), None
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    begin.record()
    target.copy_(source, non_blocking=True)
    end.record()
    torch.cuda.synchronize()
    expected_ms = 1e3 * 64 * MIB / 25e9
    assert 0.8 * expected_ms < begin.elapsed_time(end) < 4 * expected_ms, "25 GB/s, or as fast as the host copies"


def test_random_numbers_follow_generator_state_and_dropout_mask_is_kept() -> None:
    x = torch.ones(10_000, device="cuda", requires_grad=True)
    state = torch.cuda.get_rng_state()
    first = torch.nn.functional.dropout(x, 0.3)
    first.sum().backward()
    assert torch.equal(x.grad, first), "the same mask"
    assert (first == 0).float().mean().item() == pytest.approx(0.3, abs=0.02)
    assert not torch.equal(torch.nn.functional.dropout(x, 0.3), first)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.nn.functional.dropout(x, 0.3), first)


def test_captured_graph_replays_and_unjoined_stream_is_refused() -> None:
    x, side = torch.zeros(100, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)
        torch.cuda.current_stream().wait_stream(side)
    assert x.sum().item() == 0, "captured, not run"
    for _ in range(3):
        graph.replay()
    assert x.unique().tolist() == [3.0]
    # torch leaves the capture's stream current if the capture fails
    with torch.cuda.stream(torch.cuda.current_stream()):
        with pytest.raises(RuntimeError, match="[uU]njoined"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x.add_(1)
    torch.cuda.synchronize()


def test_host_function_runs_in_stream_order() -> None:
    seen: list[float] = []
    host = torch.zeros(1, pin_memory=True)
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
    runtime = ctypes.CDLL(None)
    with scheduled(Schedule("lazy")):
        host.copy_(torch.full((1,), 4.0, device="cuda"), non_blocking=True)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        assert runtime.cudaLaunchHostFunc(stream, ctypes.cast(function, ctypes.c_void_p), None) == 0
        seen.append(host.item())
    torch.cuda.synchronize()
    assert seen == [0.0] and host.item() == 4.0


def test_forked_child_has_its_own_device_if_parent_had_none() -> None:
    script = (
        "import os, torch\n"
        "child = os.fork()\n"
        "assert torch.full((3,), 2.0, device='cuda').sum().item() == 6\n"
        "child == 0 and os._exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, timeout=120, env=dict(os.environ))
