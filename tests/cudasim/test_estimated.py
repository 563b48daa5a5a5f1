"""A plan that was estimated without a device serves a run on the device; without the plan the run does not fit."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import memplug
from tests.support.estimated_worker import block, workload
from tests.support.folders import ROOT

pytestmark = pytest.mark.gpu
MIB = 2**20
BUDGET_GIB = 0.08
LIMIT_BYTES = 90 * MIB
STEPS = 2


@pytest.fixture(scope="module")
def plan_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the plan, made by a process without CUDA."""
    folder = tmp_path_factory.mktemp("plan")
    command = [sys.executable, "-m", "tests.support.estimated_worker", str(folder), torch.cuda.get_device_name()]
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    subprocess.run([*command, str(BUDGET_GIB)], check=True, cwd=ROOT, env=env, timeout=600)
    return folder


@pytest.fixture
def limited() -> Iterator[None]:
    """Limit torch's share of the device's memory."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(LIMIT_BYTES / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


def train(settings: dict | None) -> tuple[list[float], dict]:
    """Return losses, and memplug's report at the end; without settings memplug is off."""
    job = workload()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = job.make_model()
    optimizer = job.make_optimizer(model.parameters())
    inputs = {name: value.cuda() for name, value in job.inputs().items()}
    session = memplug.attach(model, settings) if settings is not None else None
    losses = []
    try:
        for _ in range(STEPS):
            loss = model(**inputs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            del loss
            if session is not None:
                session.step()
        return losses, session.report().as_dict() if session is not None else {}
    finally:
        if session is not None:
            session.detach()


def test_run_starts_with_the_estimated_plan_and_fits_only_with_it(plan_dir: Path, limited: None) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        train(block(BUDGET_GIB, False))
    gc.collect()
    torch.cuda.empty_cache()
    losses, report = train(block(BUDGET_GIB, plan_dir))
    assert report["planned_steps"] == STEPS and report["replans"] == 0
    assert report["arena_step_served"] == 1 and report["offloaded_bytes"] > 0
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert losses == train(None)[0]
