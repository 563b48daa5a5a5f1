"""Estimates of a rank of DeepSpeed: one process for each mode, as DeepSpeed never frees an engine's memory."""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from memplug.predict.estimator.engine import settings_of
from memplug.predict.estimator.estimate import estimate_model
from memplug.predict.estimator.request import Request
from memplug.predict.estimator.result import Estimate
from memplug.predict.estimator.shapes import needed
from memplug.predict.estimator.workload import Workload

log = logging.getLogger("memplug")


def estimate_rank(
    workload: Workload,
    request: Request,
    ds_config: Mapping[str, Any],
    gpus: int,
    tell: Callable[[str], None] = lambda mode: None,
) -> Estimate:
    """As `estimate`, of rank 0 of a DeepSpeed training; its engine's optimizer is that of the JSON.

    Args:
        request: of a plan that is written each rank has a file: those above 0 link to its.
        ds_config: contents of the DeepSpeed JSON.
        gpus: ranks, all in one machine.

    Among several modes selective recomputation is left out with ZeRO 3, under which torch's does not run: it counts the
    operators that gather parameters, of which a recompute pass has others.
    """
    settings, modes = settings_of(ds_config, workload.micro_batch, gpus), request.modes
    if settings.get("zero_optimization", {}).get("stage") == 3 and "selective" in modes and len(modes) > 1:
        log.warning("selective recomputation is left out: torch's does not run with ZeRO 3")
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


def _estimated(workload: Workload, request: Request, settings: Mapping[str, Any], gpus: int) -> Estimate:
    """In a process of its own."""
    logging.getLogger("memplug").setLevel(logging.ERROR)
    name = workload.shape.family.lower()
    needed(f"transformers.models.{name}.modeling_{name}")  # before ZeRO 3 changes what makes tensors
    return estimate_model(workload.make_model, workload.inputs, request, engine=settings, gpus=gpus)
