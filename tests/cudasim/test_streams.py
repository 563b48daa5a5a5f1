"""Several streams, dropped graphs, dropped sessions, and capture into CUDA graphs."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import weakref

import pytest
import torch

import memplug
from memplug.profile.recorder import Recorder
from tests.cudasim import device
from tests.cudasim.device import SCHEDULES, Schedule, scheduled
from tests.cudasim.training import ALONE, block, model
from tests.support.folders import ROOT
from tests.support.serving import reserved_bytes

pytestmark = pytest.mark.gpu

ORDERS = [*SCHEDULES, Schedule("random", 1), Schedule("random", 2)]


def tokens(generator: torch.Generator | None = None) -> torch.Tensor:
    return torch.randint(0, 128, (2, 48), generator=generator).cuda()


def gradients(network: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in network.parameters()])


def on_two_streams(alpha: float | str | None) -> torch.Tensor:
    """Run forwards on two streams, then both backwards; return the gradients of the last of three steps."""
    network, generator = model(), torch.Generator().manual_seed(3)
    session = memplug.attach(network, block(alpha, **ALONE)) if alpha is not None else None
    streams, found = [torch.cuda.Stream() for _ in range(2)], torch.empty(0)
    for _ in range(3):
        network.zero_grad()
        losses = []
        for stream in streams:
            x = tokens(generator)
            stream.wait_stream(torch.cuda.default_stream())
            x.record_stream(stream)
            with torch.cuda.stream(stream):
                losses.append(network(x, labels=x).loss)
        for stream, loss in zip(streams, losses, strict=True):
            with torch.cuda.stream(stream):
                loss.backward()
            torch.cuda.default_stream().wait_stream(stream)
        found = gradients(network).cpu()
        if session is not None:
            session.step()
    torch.cuda.synchronize()
    if session is not None:
        session.detach()
    return found


@pytest.mark.parametrize("schedule", ORDERS, ids=str)
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, "auto"])
def test_forwards_in_flight_on_two_streams_have_correct_gradients(alpha: float | str, schedule: Schedule) -> None:
    expected = on_two_streams(None)
    with scheduled(schedule):
        found = on_two_streams(alpha)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("schedule", [Schedule("lazy"), Schedule("copyfirst")], ids=str)
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_rounding_buffers_are_ordered_after_the_stream_that_ends_the_step(alpha: float, schedule: Schedule) -> None:
    """Make gradients on two streams; read and free them on the default stream, which alone is ordered after both."""
    network, generator = model(), torch.Generator().manual_seed(3)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    session = memplug.attach(network, block(alpha, arena={"enabled": False}))
    streams = [torch.cuda.Stream() for _ in range(2)]
    with scheduled(schedule):
        for _ in range(4):
            for stream in streams:
                x = tokens(generator)
                stream.wait_stream(torch.cuda.default_stream())
                x.record_stream(stream)
                with torch.cuda.stream(stream):
                    network(x, labels=x).loss.backward()
                torch.cuda.default_stream().wait_stream(stream)
            optimizer.step()
            optimizer.zero_grad()
            session.step()
        torch.cuda.synchronize()
        assert session.report().tokenwise.buffer_bytes > 0 and session.report().arena.state == "off"
        session.detach()


@pytest.mark.parametrize("parts", [ALONE, {}], ids=["alone", "with recorder and arena"])
def test_dropped_session_frees_everything_once_its_copies_are_done(parts: dict) -> None:
    gc.collect()
    before = device.registered()
    with scheduled(Schedule("lazy")):
        network = model()
        session = memplug.attach(network, block(1.0, **parts))
        for _ in range(8):
            x = tokens()
            network(x, labels=x).loss.backward()
            network.zero_grad()
            session.step()
        x = tokens()
        network(x, labels=x)  # this forward's copies are still running
        assert device.registered() > before
        pool = weakref.ref(session._attached.executor.pool)
        del session, network, x
        gc.collect()
        assert pool() is None and device.registered() == before
        assert reserved_bytes() == 0
        Recorder("cuda").stop()  # raises if the process has another recorder


UNMAP = """
import torch, memplug
from tests.cudasim import device
from tests.cudasim.training import ALONE, block, model
network = model()
session = memplug.attach(network, block(1.0, **ALONE))
x = torch.randint(0, 128, (8, 512)).cuda()
torch.cuda.synchronize()
out = network(x, labels=x).loss
del out  # no backward: the graph's end frees the tensors of the last two regions
session._attached.executor.transfer.drain()
torch.cuda.empty_cache()
assert device.violations() == 0
torch.cuda.synchronize()
session.detach()
print("done")
"""


def test_memory_of_abandoned_graph_is_unmapped_after_its_offloads() -> None:
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": "expandable_segments:True", "CUDASIM_POLICY": "computefirst"}
    done = subprocess.run(
        [sys.executable, "-c", UNMAP], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120
    )
    assert done.returncode == 0 and "done" in done.stdout, done.stderr[-2000:]


def test_region_captured_into_cuda_graph_runs_unmodified_and_logs_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    network, reference = model(), model()
    x, y = tokens(), tokens()
    with memplug.attach(network, block(1.0, **ALONE)) as session:
        for _ in range(3):
            network(y, labels=y).loss.backward()
            network.zero_grad(set_to_none=False)
            session.step()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            network(x, labels=x).loss.backward()
        network.zero_grad(set_to_none=False)
        loss = network(y, labels=y).loss  # a forward in flight while the graph replays
        graph.replay()
        loss.backward()
    for batch in (x, y):
        reference(batch, labels=batch).loss.backward()
    torch.testing.assert_close(gradients(network), gradients(reference), rtol=1e-4, atol=1e-6)
    assert sum("inside of a CUDA graph" in message for message in caplog.messages) == 1
    assert caplog.records and all(record.levelno >= logging.INFO for record in caplog.records)


def test_link_measurement_does_not_raise_the_memory_peak() -> None:
    from memplug.device import hardware

    hardware.link_rates.cache_clear()
    kept = torch.empty(300 << 20, dtype=torch.uint8, device="cuda")
    del kept
    before = torch.cuda.max_memory_allocated()
    hardware.link_rates(torch.device("cuda"))
    assert torch.cuda.max_memory_allocated() == before
