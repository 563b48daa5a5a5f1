"""Run tests marked `device` on a GPU, as a plugin.

Call: `python -m pytest -p tests.on_cuda -m "(gpu or device) and not long"`.

torch is asked for deterministic kernels, since those that add in any order would differ between two runs of one step.
The workspaces of cuBLAS are made small: the usual ones need more memory than a tiny model. Tests of a full
device fill its memory: requests of tests that run in other processes meanwhile may fail.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # KiB; read when cuBLAS is loaded
os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "128")  # KiB; torch's own setting

import torch

from tests.support.cuda_by_default import cuda_by_default, skip_those_of_the_cpu


def pytest_configure() -> None:
    """Check that there is a GPU."""
    if not torch.cuda.is_available():
        raise pytest.UsageError("tests.on_cuda needs a CUDA device; without one: -p tests.cudasim.plugin")
    torch.use_deterministic_algorithms(True, warn_only=True)


def pytest_report_header() -> str:
    """Name the device that tests use."""
    return f"tests marked `device` run on {torch.cuda.get_device_name()}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need the CPU, marked `cpu`."""
    skip_those_of_the_cpu(items)


@pytest.fixture(scope="module", autouse=True)
def on_cuda(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make CUDA the default device in modules marked `device`."""
    with cuda_by_default() if request.node.get_closest_marker("device") else contextlib.nullcontext():
        yield
