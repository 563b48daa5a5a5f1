"""Tests marked `device` on a GPU, as a plugin: `python -m pytest -p tests.on_cuda -m "(gpu or device) and not long"`.

Kernels that add in any order would differ between two runs of one step: torch is asked for those that do not. What
cuBLAS takes for itself would be more than all of a tiny model. In one process: tests of a full device fill it, and the
requests of others fail then.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # KiB; read when cuBLAS is loaded
os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "128")  # KiB; torch's

import torch

from tests.support.cuda_by_default import cuda_by_default, skip_those_of_the_cpu


def pytest_configure() -> None:
    """There is a GPU."""
    if not torch.cuda.is_available():
        raise pytest.UsageError("tests.on_cuda needs a CUDA device; without one: -p tests.cudasim.plugin")
    torch.use_deterministic_algorithms(True, warn_only=True)


def pytest_report_header() -> str:
    """Which device tests find."""
    return f"tests marked `device` run on {torch.cuda.get_device_name()}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of what only the CPU has are skipped."""
    skip_those_of_the_cpu(items)


@pytest.fixture(scope="module", autouse=True)
def on_cuda(request: pytest.FixtureRequest) -> Iterator[None]:
    """Modules marked `device` have it for default."""
    with cuda_by_default() if request.node.get_closest_marker("device") else contextlib.nullcontext():
        yield
