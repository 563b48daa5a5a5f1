"""Estimates Megatron-Core: runs each distinct pipeline stage in its own process, and combines the results."""

from __future__ import annotations

import dataclasses
import functools
import logging
import multiprocessing
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor

from memplug.errors import EstimateError
from memplug.predict.estimator import megatron
from memplug.predict.estimator.estimate import estimate_training
from memplug.predict.estimator.layout import RankLayout
from memplug.predict.estimator.request import EstimateRequest
from memplug.predict.estimator.result import Estimate, ModeEstimate
from memplug.predict.estimator.workload import Workload

LARGEST = (
    *("peak_allocated_bytes", "peak_reserved_bytes", "arena_bytes", "arena_room_bytes"),
    *("host_bytes", "to_host_bytes", "to_device_bytes"),
)
"""Fields of `ModeEstimate` whose value for a pipeline is the largest of all stages."""


def estimate_megatron(
    workload: Workload,
    request: EstimateRequest,
    layout: RankLayout,
    micro_batches: int,
    say: Callable[[str], None] = lambda what: None,
) -> Estimate:
    """Estimate a rank of a Megatron-Core training as `estimate` does.

    In a pipeline, one rank of each distinct stage is estimated (`RankLayout.stages`). Each stage plans by itself, as if
    all other stages made the same plan.

    Args:
        workload: The whole model, with its head.
        request: The block, the GPU and the modes.
        layout: How the model is split over the ranks.
        micro_batches: Micro-batches of a step on each data-parallel rank.
        say: Called before each stage runs, with words such as "stage 1"; without a pipeline, with the names of the
            modes.

    Raises:
        EstimateError: The model cannot be split over the ranks as the layout says, or the request has a folder for
            plans.
    """
    if request.plan_dir is not None:
        raise EstimateError(
            "no plan can be written for Megatron-Core's ranks: stages differ, and estimated plans are untested there",
            "Leave out --plan-dir: the run plans in its first steps, and keeps its plan for the next run.",
        )
    layout.check(workload.shape, workload.layers, workload.seq_len)
    make_training = functools.partial(megatron.MegatronTraining, workload, layout, micro_batches)
    stages = {}
    for stage in layout.stages:
        say(f"stage {stage}" if layout.pipeline > 1 else ", ".join(request.modes))
        rank = functools.partial(megatron.rank_of, layout, stage, workload, micro_batches)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_quietly) as pool:
            stages[stage] = pool.submit(estimate_training, make_training, request, rank=rank).result()
    return of_all(stages, layout, micro_batches) if layout.pipeline > 1 else stages[0]


def _quietly() -> None:
    """Silence warnings in this process, and memplug's log messages below errors."""
    logging.getLogger("memplug").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # Megatron-Core warns of kernels that are not installed


def of_all(stages: Mapping[int, Estimate], layout: RankLayout, micro_batches: int) -> Estimate:
    """Combine the stages' estimates into the pipeline's estimate.

    Each amount of memory is the largest of all stages. The step's time is the slowest stage's time plus the bubble,
    which this function adds because a stage on the virtual device never waits for another. In 1F1B the bubble is the
    time in which one micro-batch passes forward and backward through all stages but the slowest. With p equal stages
    and m micro-batches it is (p - 1) / m of the schedule's time (Narayanan et al., "Efficient large-scale language
    model training on GPU clusters using Megatron-LM", 2021, section 2.2.1). The predicted time is exact if all stages
    are equal, or if the last stage, which has head and loss, is the slowest. If an earlier stage is the slowest, the
    step takes a little less.

    Args:
        stages: The estimates of the stages in `layout.stages`, by stage number.
        layout: How the model is split over the ranks.
        micro_batches: Micro-batches of a step.
    """
    hardware = stages[0].hardware
    impossible = {}
    for each in stages.values():
        for mode, error in each.impossible.items():
            impossible[mode] = max(error, impossible.get(mode, error), key=lambda error: error.least_gib)
    modes = {
        mode: _of_stages({stage: each[mode] for stage, each in stages.items()}, layout, micro_batches)
        for mode in stages[0]
        if mode not in impossible
    }
    return Estimate(hardware, modes, impossible, stages)


def _of_stages(stages: Mapping[int, ModeEstimate], layout: RankLayout, micro_batches: int) -> ModeEstimate:
    """Combine the stages' estimates of one mode; `flops` becomes the mean over all stages of the pipeline."""
    slowest = max(stages.values(), key=lambda stage: stage.step_s)
    passed_s = sum(layout.stages[number] * stage.schedule_s for number, stage in stages.items())
    bubble_s = (passed_s - slowest.schedule_s) / micro_batches
    largest = {name: max(getattr(stage, name) for stage in stages.values()) for name in LARGEST}
    if any(stage.arena_reserved_bytes is not None for stage in stages.values()):
        largest["arena_reserved_bytes"] = max(_reserved_bytes(stage) for stage in stages.values())
    return dataclasses.replace(
        slowest,
        step_s=slowest.step_s + bubble_s,
        flops=sum(layout.stages[number] * stage.flops for number, stage in stages.items()) / layout.pipeline,
        fits=all(stage.fits for stage in stages.values()),
        bubble_s=bubble_s,
        **largest,
    )


def _reserved_bytes(stage: ModeEstimate) -> int:
    """Return the device bytes that a stage reserves: with the arena if the arena serves there, otherwise without."""
    return stage.peak_reserved_bytes if stage.arena_reserved_bytes is None else stage.arena_reserved_bytes
