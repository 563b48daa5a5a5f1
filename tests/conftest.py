"""Settings and fixtures for every test: one thread a worker, no device unless asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped, with the reason, where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def cpu_engine(tmp_path: Path) -> Iterator[None]:
    """DeepSpeed can make engines on the CPU; `memplug.install` is undone afterwards."""
    import memplug
    from tests.hosts import process_group

    with process_group(tmp_path):
        yield
    memplug.uninstall()


@pytest.fixture
def nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making an executor, and with it streams and host memory, fails the test."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("an executor was made")

    monkeypatch.setattr("memplug.session.Executor", refuse)
    monkeypatch.setattr("memplug.execute.device.Device.new_stream", refuse)
