"""The modes in which a DeepSpeed rank's step is estimated."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from memplug.config import MemplugConfig
from memplug.predict.estimator import MODES, Estimate, ranks
from memplug.predict.estimator.request import EstimateRequest
from memplug.predict.estimator.shapes import Shape
from memplug.predict.estimator.workload import Workload
from memplug.predict.virtual import GpuProfile


@pytest.mark.parametrize(("stage", "left_out"), [(2, set()), (3, {"selective"})])
def test_estimate_leaves_out_selective_recomputation_under_zero_3(
    stage: int, left_out: set[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hardware, workload = GpuProfile.named("h200"), Workload(shape=Shape({}), layers=1, seq_len=8)

    def estimated(*given: Any) -> Estimate:
        return Estimate(hardware, {given[1].modes[0]: None}, {})

    monkeypatch.setattr(ranks, "_estimated", estimated)
    monkeypatch.setattr(ranks, "ProcessPoolExecutor", lambda workers, context: ThreadPoolExecutor(workers))
    with caplog.at_level(logging.WARNING, "memplug"):
        request = EstimateRequest(config=MemplugConfig(enabled=True), hardware=hardware)
        found = ranks.estimate_rank(workload, request, {"zero_optimization": {"stage": stage}}, 2)
    assert set(found) == set(MODES) - left_out
    assert ("left out" in caplog.text) is bool(left_out)
