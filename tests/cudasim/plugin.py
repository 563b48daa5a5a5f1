"""Simulated CUDA as a plugin: `python -m pytest -p tests.cudasim.plugin ...`; README.md says what is simulated."""

from __future__ import annotations

import contextlib
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cudasim.build import build

PRELOAD = "LD_PRELOAD"
# the folder's sitecustomize replaces NCCL by the stand-in, in this process and in its children
SITE = Path(__file__).parent / "site"


def enter() -> None:
    """Restart this process with the simulated CUDA runtime in front of torch's, unless it is there already."""
    if "libcudasim" in os.environ.get(PRELOAD, ""):
        return
    library = str(build() / "libcudasim.so")
    preloaded = os.pathsep.join(filter(None, [library, os.environ.get(PRELOAD)]))
    path = os.pathsep.join(filter(None, [str(SITE), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, PRELOAD: preloaded, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    sys.stdout.flush()
    os.execve(sys.executable, sys.orig_argv, environment)


enter()

import torch  # noqa: E402  # behind the simulated runtime

from tests.cudasim import device, table  # noqa: E402
from tests.support.cuda_by_default import cuda_by_default, skip_those_of_the_cpu  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for the table of README.md."""
    parser.addoption("--table", nargs=2, metavar=("FILE", "PLACE"), help="write what ran under which schedule there")


def pytest_report_header() -> str:
    """Return a line on the device that tests run on."""
    return f"CUDA is simulated: schedule {os.environ.get('CUDASIM_POLICY', 'by the name of each test')}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need the CPU, marked `cpu`."""
    skip_those_of_the_cpu(items)


@pytest.fixture(scope="module", autouse=True)
def on_simulated_cuda(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make the simulated device the default in modules marked `device`."""
    with cuda_by_default() if request.node.get_closest_marker("device") else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True)
def ordered(request: pytest.FixtureRequest, on_simulated_cuda: None) -> Iterator[None]:
    """Fail a test whose accesses are unordered, unless it is marked `unordered`.

    In modules marked `device`, choose the test's schedule by its name.
    """
    before = device.violations()
    device.used.clear()
    with contextlib.ExitStack() as stack:
        if request.node.get_closest_marker("device") is not None and "CUDASIM_POLICY" not in os.environ:
            stack.enter_context(device.scheduled(schedule_of(request.node.nodeid)))
        yield
    if request.node.get_closest_marker("unordered") is not None:
        torch.cuda.synchronize()  # unfinished work must not count for the next test
    else:
        assert device.violations() == before, "cudasim has told what is not ordered"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Note the schedules that the test ran under."""
    yield
    item.user_properties.append(("schedules", dict(device.used) or {str(device.current()): 1}))


def schedule_of(name: str) -> device.Schedule:
    """Return a schedule that depends only on the test's name."""
    number = zlib.crc32(name.encode())
    return [*device.SCHEDULES, device.Schedule("random", number % 1000)][number % (len(device.SCHEDULES) + 1)]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the table of tests and schedules, and write it to the file that `--table` names."""
    passed = terminalreporter.stats.get("passed", [])
    rows = table.of([(report.nodeid, dict(report.user_properties).get("schedules", {})) for report in passed])
    terminalreporter.section("what ran under which schedule")
    terminalreporter.write_line(rows)
    if config.getoption("--table"):
        table.write(*config.getoption("--table"), rows)
