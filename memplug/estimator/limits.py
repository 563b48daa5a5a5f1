"""The longest sequence and the largest micro-batch that fit a GPU, of each mode.

Memory rises evenly with the layers, of which all are alike, and with the tokens. So a step is run with few layers and
extrapolated to all of them, at two sizes and extrapolated to what the GPU has; steps with all layers then say whether
that fits, and correct it. `options` are further ones of `estimate`, such as `host_bytes`; `say` is told each step that
is run, and how many there are at most.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

from memplug.config import MemplugConfig
from memplug.device.capacity import DEVICE_SHARE
from memplug.device.virtual import Hardware
from memplug.estimator.estimate import estimate
from memplug.estimator.workload import Workload

FEW_LAYERS = (2, 4)
SEQ_LEN_STEP = 256  # tokens
NO_BUDGET_GIB = 1e-3
PRECISION = 32
MOST_CHECKS = 4  # of one size, with all layers
GIB = 2**30
Say = Callable[[str], None]


def _nothing(words: str) -> None:
    """By default."""


def _numbered(say: Say, mode: str, layers: int) -> Say:
    """Tells of one search's steps, which it counts."""
    most = MOST_CHECKS + 2 * (len(FEW_LAYERS) if layers > FEW_LAYERS[1] else 1)
    steps = itertools.count(1)
    return lambda words: say(f"limits of {mode}, step {next(steps)} of at most {most}: {words}")


def longest(
    workload: Workload, config: MemplugConfig, hardware: Hardware, mode: str, *, say: Say = _nothing, **options: Any
) -> int:
    """Tokens of the longest sequence of which a step fits, a multiple of `SEQ_LEN_STEP`; 0: none fits."""
    said = _numbered(say, mode, workload.layers)

    def bytes_of(count: int, layers: int) -> float:
        said(f"a sequence of {count * SEQ_LEN_STEP:,} tokens, {layers} layers")
        changed = dataclasses.replace(workload, seq_len=count * SEQ_LEN_STEP, layers=layers)
        return least_bytes(changed, config, hardware, mode, **options)

    begin = max(1, workload.seq_len // SEQ_LEN_STEP)
    return SEQ_LEN_STEP * largest(bytes_of, begin, workload.layers, capacity_bytes(hardware, config, mode))


def largest_batch(
    workload: Workload, config: MemplugConfig, hardware: Hardware, mode: str, *, say: Say = _nothing, **options: Any
) -> int:
    """Sequences of the largest micro-batch of which a step fits; 0: none does."""
    said = _numbered(say, mode, workload.layers)

    def bytes_of(count: int, layers: int) -> float:
        said(f"a micro-batch of {count:,}, {layers} layers")
        changed = dataclasses.replace(workload, micro_batch=count, layers=layers)
        return least_bytes(changed, config, hardware, mode, **options)

    return largest(bytes_of, workload.micro_batch, workload.layers, capacity_bytes(hardware, config, mode))


def capacity_bytes(hardware: Hardware, config: MemplugConfig, mode: str) -> float:
    """That a step of a mode may take of the device: memplug keeps to its budget, or leaves some of it free."""
    if mode != "memplug":
        return hardware.memory_bytes
    if config.device_budget_gib == "auto":
        return hardware.memory_bytes * DEVICE_SHARE
    return min(config.device_budget_gib * GIB, hardware.memory_bytes)


def least_bytes(workload: Workload, config: MemplugConfig, hardware: Hardware, mode: str, **options: Any) -> float:
    """That a step of a mode takes at least: of memplug, with everything in layers swapped or recomputed, and nothing
    outside of them; of the others, what torch's allocator reserves.
    """
    changes: dict[str, Any] = {
        "device_budget_gib": NO_BUDGET_GIB,
        "swap": config.swap.model_copy(update={"enabled": False}),
    }
    if mode != "memplug":
        changes = {"arena": config.arena.model_copy(update={"enabled": False})}
    found = estimate(
        workload.make_model,
        workload.inputs,
        config.model_copy(update=changes),
        hardware,
        (mode,),
        make_optimizer=workload.make_optimizer if workload.optimizer else None,
        **options,
    )
    if mode in found.impossible:
        return found.impossible[mode].least_gib * GIB
    return found[mode].peak_reserved_bytes


def largest(bytes_of: Callable[[int, int], float], begin: int, layers: int, limit_bytes: float) -> int:
    """The largest count whose step, with all layers, takes no more than the limit; 0: none does.

    Args:
        bytes_of: of a count and a number of layers.
        begin: a count to begin with.
    """

    def predicted(count: int) -> float:
        if layers <= FEW_LAYERS[1]:
            return bytes_of(count, layers)
        fewer, more = (bytes_of(count, few) for few in FEW_LAYERS)
        return fewer + (more - fewer) / (FEW_LAYERS[1] - FEW_LAYERS[0]) * (layers - FEW_LAYERS[0])

    low = predicted(begin)
    slope = max((predicted(2 * begin) - low) / begin, 1.0)
    count = max(1, begin + math.floor((limit_bytes - low) / slope))
    fits, fails, failed = 0, None, 0  # the largest that is known to fit, the smallest that is known not to
    for _ in range(MOST_CHECKS):
        more = math.floor((limit_bytes - bytes_of(count, layers)) / slope)
        if more >= 0:
            fits = count
        else:
            fails, failed = count, failed + 1
        precise = max(1, fits // PRECISION)
        if 0 <= more < precise or (fails is not None and fails - fits <= precise):
            break
        count = max(count + more, fits + 1)
        if fails is not None:
            count = (fits + fails) // 2 if failed > 1 else min(count, fails - 1)
    return fits
