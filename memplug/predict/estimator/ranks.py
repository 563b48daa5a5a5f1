"""Estimates a DeepSpeed rank, each mode in its own process, because DeepSpeed never frees an engine's memory."""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from memplug.predict.estimator.engine import settings_of
from memplug.predict.estimator.estimate import estimate_model
from memplug.predict.estimator.request import EstimateRequest
from memplug.predict.estimator.result import Estimate
from memplug.predict.estimator.shapes import needed
from memplug.predict.estimator.workload import Workload

log = logging.getLogger("memplug")


def estimate_rank(
    workload: Workload,
    request: EstimateRequest,
    ds_config: Mapping[str, Any],
    gpus: int,
    tell: Callable[[str], None] = lambda mode: None,
) -> Estimate:
    """Estimate rank 0 of a DeepSpeed training, as `estimate` does, with the JSON's optimizer.

    With ZeRO 3, mode "selective" is skipped unless it is the only mode. torch's selective recomputation identifies an
    operator by its index among the forward's operators. It fails with ZeRO 3, where gathering parameters runs a
    different number of operators in a recompute pass.

    Args:
        workload: The model and batch of one rank.
        request: The block, the GPU and the modes. If it has a folder for plans, rank 0's plan is written there, and
            each other rank gets a link to that file.
        ds_config: The contents of the DeepSpeed JSON.
        gpus: The number of ranks, all in one machine.
        tell: Called with the name of each mode before the mode runs.
    """
    settings, modes = settings_of(ds_config, workload.micro_batch, gpus), request.modes
    if settings.get("zero_optimization", {}).get("stage") == 3 and "selective" in modes and len(modes) > 1:
        log.warning("mode selective is left out: torch's selective recomputation does not run with ZeRO 3")
        modes = tuple(mode for mode in modes if mode != "selective")
    found, impossible = {}, {}
    for mode in modes:
        tell(mode)
        plan_dir = request.plan_dir if mode == "memplug" else None
        one = dataclasses.replace(request, modes=(mode,), plan_dir=plan_dir)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            estimated = pool.submit(_estimated, workload, one, settings, gpus).result()
        found.update(estimated.modes)
        impossible.update(estimated.impossible)
    return Estimate(request.hardware, found, impossible)


def _estimated(workload: Workload, request: EstimateRequest, settings: Mapping[str, Any], gpus: int) -> Estimate:
    """Estimate one mode; runs in a process of its own."""
    logging.getLogger("memplug").setLevel(logging.ERROR)
    name = workload.shape.family.lower()
    needed(f"transformers.models.{name}.modeling_{name}")  # imported before ZeRO 3 patches torch's tensor factories
    return estimate_model(workload.make_model, workload.inputs, request, engine=settings, gpus=gpus)
