"""CUDA without a GPU, as a plugin: `python -m pytest -p tests.cudasim.plugin ...`; README.md says what is simulated."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from tests.cudasim.build import build

PRELOAD = "LD_PRELOAD"


def enter() -> None:
    """Start this process anew with the simulated CUDA runtime in front of torch's, unless it is there already."""
    if "libcudasim" in os.environ.get(PRELOAD, ""):
        return
    library = str(build() / "libcudasim.so")
    preloaded = os.pathsep.join(filter(None, [library, os.environ.get(PRELOAD)]))
    environment = {**os.environ, PRELOAD: preloaded, "OMP_NUM_THREADS": "1"}
    sys.stdout.flush()
    os.execve(sys.executable, sys.orig_argv, environment)


enter()


def pytest_configure(config: pytest.Config) -> None:
    """What only these tests are marked with."""
    config.addinivalue_line("markers", "unordered: accesses that conflict are not ordered, on purpose")


def pytest_report_header() -> str:
    """Which device tests find."""
    policy, seed = os.environ.get("CUDASIM_POLICY", "eager"), os.environ.get("CUDASIM_SEED", "0")
    return f"CUDA is simulated: schedule {policy}, seed {seed}"


@pytest.fixture(autouse=True)
def nothing_is_unordered(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test fails where accesses of its tasks conflict without being ordered, but for one marked `unordered`."""
    from tests.cudasim.device import violations

    before = violations()
    yield
    if request.node.get_closest_marker("unordered") is None:
        assert violations() == before, "cudasim has told what is not ordered"
