"""Estimates of a rank of DeepSpeed: one process for each mode, as DeepSpeed never frees an engine's memory."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from memplug.config import MemplugConfig
from memplug.predict.estimator.engine import settings_of
from memplug.predict.estimator.estimate import estimate, refuse_plan
from memplug.predict.estimator.result import Estimate
from memplug.predict.estimator.shapes import needed
from memplug.predict.estimator.workload import Workload
from memplug.predict.virtual import Hardware

log = logging.getLogger("memplug")


def estimate_rank(
    workload: Workload,
    config: MemplugConfig,
    hardware: Hardware,
    modes: Sequence[str],
    ds_config: Mapping[str, Any],
    gpus: int,
    *,
    tell: Callable[[str], None] = lambda mode: None,
    **options: Any,
) -> Estimate:
    """As `estimate`, of rank 0 of a DeepSpeed training; its engine's optimizer is that of the JSON.

    Args:
        ds_config: contents of the DeepSpeed JSON.
        gpus: ranks, all in one machine.
        options: further ones of `estimate`. Of a plan that is written each rank has a file: those above 0 link to its.

    Among several modes selective recomputation is left out with ZeRO 3, under which torch's does not run: it counts the
    operators that gather parameters, of which a recompute pass has others.
    """
    refuse_plan(modes, options.get("plan_dir"))
    settings = settings_of(ds_config, workload.micro_batch, gpus)
    if settings.get("zero_optimization", {}).get("stage") == 3 and "selective" in modes and len(modes) > 1:
        log.warning("selective recomputation is left out: torch's does not run with ZeRO 3")
        modes = [mode for mode in modes if mode != "selective"]
    found, impossible = {}, {}
    for mode in modes:
        tell(mode)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            one = pool.submit(_estimated, workload, config, hardware, mode, settings, gpus, options).result()
        found.update(one.modes)
        impossible.update(one.impossible)
    return Estimate(hardware, found, impossible)


def _estimated(
    workload: Workload,
    config: MemplugConfig,
    hardware: Hardware,
    mode: str,
    settings: Mapping[str, Any],
    gpus: int,
    options: Mapping[str, Any],
) -> Estimate:
    """In a process of its own."""
    logging.getLogger("memplug").setLevel(logging.ERROR)
    name = workload.shape.family.lower()
    needed(f"transformers.models.{name}.modeling_{name}")  # before ZeRO 3 changes what makes tensors
    if mode != "memplug":
        options = {**options, "plan_dir": None}
    return estimate(
        workload.make_model, workload.inputs, config, hardware, (mode,), engine=settings, gpus=gpus, **options
    )
