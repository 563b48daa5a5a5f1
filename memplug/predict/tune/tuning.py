"""Tuning from end to end: a DeepSpeed JSON, a model and a machine in; the best configurations and a JSON out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memplug.config import read_ds_config
from memplug.device.capacity import granted_bytes
from memplug.errors import TuneError
from memplug.predict.estimator.shapes import Shape
from memplug.predict.tune.deepspeed import deepspeed_json
from memplug.predict.tune.estimate import StepEstimator
from memplug.predict.tune.fixed import Fixed
from memplug.predict.tune.machine import Machine
from memplug.predict.tune.profiled import profile
from memplug.predict.tune.search import Box, Configuration, Limits, Prediction, least_memory, search
from memplug.predict.tune.space import space_of
from memplug.sizes import GIB

SEQ_LEN = 4096
"""Where neither the command line nor the model's shape says."""
COUNT = 10


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """Attributes:
    best: configurations that fit, the fastest first, with their predictions.
    fits: configurations that fit and are not among them, of those that were looked at one by one.
    ruled_out: all others, by reason.
    limits: that were kept.
    ds_config: the user's DeepSpeed JSON with the best configuration.
    """

    best: tuple[tuple[Configuration, Prediction], ...]
    fits: int
    ruled_out: Counter[str]
    limits: Limits
    ds_config: dict[str, Any]


def tune(
    ds_config: Mapping[str, Any],
    shape: Shape,
    machine: Machine,
    host_bytes: float,
    *,
    seq_len: int | None = None,
    micro_batch: int | None = None,
) -> Tuned:
    """Find the fastest configurations that fit, for what a DeepSpeed JSON leaves free.

    Args:
        host_bytes: of the machine's memory that training may take.
        seq_len: tokens of a sequence; by default `max_position_embeddings` of the model.
        micro_batch: sequences of a rank's micro-batch; by default the JSON's, or free.

    Raises:
        ConfigError: the "memplug" block has problems.
        TuneError: what is fixed cannot be, or nothing fits: it names the least memory, and by which configuration.
    """
    block = read_ds_config(ds_config)
    fixed = Fixed.of(ds_config, block, micro_batch)
    if not 0 <= host_bytes < math.inf:
        raise TuneError(f"host memory is {host_bytes} bytes", "Give a number from 0, of the machine's memory.")
    tokens = seq_len or shape.fields.get("max_position_embeddings", SEQ_LEN)
    fixed.layouts()  # refuses what does not go together, before a model is run
    sizes = {size for size, _ in fixed.batches(machine.gpus)}
    profiles = {size: profile(machine.hardware, shape, size, tokens) for size in sorted(sizes)}
    space = space_of(fixed, machine, profiles)
    estimator = StepEstimator(machine, profiles)
    device_bytes = granted_bytes(block.device_budget_gib, machine.hardware.memory_bytes)
    limits = Limits(device_bytes, host_bytes)
    found = search(space.boxes, estimator, limits, COUNT)
    if not found.best:
        raise _nothing_fits(space.boxes, estimator, limits)
    at, prediction = found.best[0]
    swapped = machine.gpus * at.n_swap * profiles[at.layout.micro_batch].swapped_bytes
    made = deepspeed_json(
        ds_config,
        at,
        estimator.chunks(at.layout),
        gpus=machine.gpus,
        hidden_size=shape.fields["hidden_size"],
        device_budget_bytes=device_bytes,
        host_budget_bytes=(host_bytes - prediction.host_bytes + swapped) / machine.gpus,
    )
    return Tuned(
        best=found.best, fits=found.fits, ruled_out=found.ruled_out + space.ruled_out, limits=limits, ds_config=made
    )


def configuration_words(at: Configuration) -> str:
    """A configuration in one line."""
    layout = at.layout
    offload = {"none": "nothing", "optimizer": "the optimizer", "parameters": "optimizer and parameters"}
    return (
        f"ZeRO {layout.stage} with {offload[layout.offload]} offloaded, a micro-batch of {layout.micro_batch} in "
        f"{layout.accumulation}, n_persist {at.n_persist}, n_buffer {at.n_buffer}, n_swap {at.n_swap}, "
        f"n_checkpoint {at.n_checkpoint}"
    )


def _nothing_fits(boxes: tuple[Box, ...], estimator: StepEstimator, limits: Limits) -> TuneError:
    """The least device memory that the host allows, and the least at all."""
    ways = [least_memory(boxes, estimator, limits)]
    unlimited = least_memory(boxes, estimator, Limits(limits.device_bytes, float("inf")))
    if unlimited[0] != ways[0][0]:
        ways.append(unlimited)
    least = "; or ".join(
        f"{made.device_bytes / GIB:.1f} GiB of the device and {made.host_bytes / GIB:.0f} GiB of the host, by "
        f"{configuration_words(at)}"
        for at, made in ways
    )
    return TuneError(
        f"no configuration fits {limits.device_bytes / GIB:.1f} GiB of a GPU and {limits.host_bytes / GIB:.0f} GiB of "
        f"the host: the least is {least}",
        "More GPUs, more host memory or a shorter sequence; or leave more of the DeepSpeed JSON free.",
    )
