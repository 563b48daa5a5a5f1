"""Settings and fixtures of all tests: one thread per worker, and no device unless a test asks for one."""

from __future__ import annotations

import gc
import os
import weakref
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

import memplug
from memplug.errors import TraceError
from memplug.hooks import attach as attach_module
from memplug.session.recording import Recording
from memplug.tokenwise.budgets import DeviceBudget
from memplug.tokenwise.predictions import Predictions
from tests.support import extension
from tests.support.pictures import chrome  # noqa: F401  (a fixture)

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
# slow generation of examples is a matter of the machine, not of the code
settings.register_profile("patient", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("patient")


CORE = pytest.StashKey[Future]()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Build the native core and the tests' C++ extension while tests are collected."""
    session.config.stash[CORE] = ThreadPoolExecutor(1).submit(extension.load)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Wait for both builds, so that no test has to, and freeze the imported objects.

    The garbage collector then does not scan them again in every test that collects garbage.
    """
    session.config.stash[CORE].result()
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu`, with the reason, if there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how long each room's tests took, summed over all workers."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.split("/")[1]] += report.duration
    terminalreporter.section("seconds of each room")
    terminalreporter.line(", ".join(f"{room} {spent:.0f}" for room, spent in seconds.most_common()))


@pytest.fixture(autouse=True)
def sessions_are_detached(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Detach each session that a test leaves attached.

    Otherwise that session would keep this process's recorder, and the sessions of later tests could not get it.
    """
    made: list[weakref.ref[memplug.Session]] = []

    def attach(*args: Any) -> memplug.Session:
        session = original(*args)
        made.append(weakref.ref(session))
        return session

    original = attach_module._attach
    monkeypatch.setattr(attach_module, "_attach", attach)
    yield
    for reference in made:
        session = reference()
        if session is not None:
            session.detach()


@pytest.fixture(autouse=True)
def plans_do_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test where users get a warning that a step offloads other bytes than its plan says."""

    def fail(self: Predictions, sent: int, expected: int) -> None:
        raise AssertionError(f"{sent:,} bytes were sent to the host in a step that was to send {expected:,}")

    monkeypatch.setattr(Predictions, "warn", fail)


@pytest.fixture(autouse=True)
def records_are_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test where users get a warning that a recording is unusable."""

    def fail(self: Recording, error: TraceError) -> None:
        raise error

    monkeypatch.setattr(Recording, "refuse", fail)


@pytest.fixture(autouse=True)
def plans_are_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the folder for plans into a temporary working directory, unless a test says otherwise."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def peaks_are_kept_apart() -> None:
    """Reset the peaks of the device, so that plans are made from the memory that this test takes."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@pytest.fixture
def keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make plans find no room on the device for outputs, as on the CPU, so that even small models swap."""
    monkeypatch.setattr(DeviceBudget, "room_bytes", lambda *args: 0)


@pytest.fixture
def cpu_engine(tmp_path: Path) -> Iterator[None]:
    """Let DeepSpeed make engines on the CPU, and undo `memplug.install` afterwards."""
    from tests.support.hosts import process_group

    with process_group(tmp_path):
        yield
    memplug.uninstall()


@pytest.fixture
def nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if it makes an executor, which takes host memory, or a device's streams."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("an executor was made")

    monkeypatch.setattr("memplug.tokenwise.technique.Executor", refuse)
    monkeypatch.setattr("memplug.device.device.Device.streams", refuse)


@pytest.fixture
def group(tmp_path: Any) -> Iterator[Any]:
    backend = "gloo" if torch.get_default_device().type == "cpu" else "nccl"
    dist.init_process_group(backend, store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
