"""Runs `memplug tune`: from a DeepSpeed JSON, a model and a machine to the best configurations and a new JSON."""

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
from memplug.predict.tune.search import Box, Configuration, MemoryLimits, Prediction, least_memory, search
from memplug.predict.tune.space import space_of
from memplug.sizes import GIB

SEQ_LEN = 4096
"""Tokens in a sequence if neither the command line nor the model's shape gives a number."""
COUNT = 10


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The result of tuning.

    Attributes:
        best: Pairs of configuration and prediction: the fastest configurations that fit, best first.
        fits: The number of predicted configurations that fit but are not among `best`.
        ruled_out: The number of all other configurations, by the reason that ruled them out.
        limits: The memory limits of the search.
        ds_config: The user's DeepSpeed JSON with the settings of the best configuration.
    """

    best: tuple[tuple[Configuration, Prediction], ...]
    fits: int
    ruled_out: Counter[str]
    limits: MemoryLimits
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
    """Find the fastest configurations that fit, and change no value that the DeepSpeed JSON fixes.

    Args:
        ds_config: The user's DeepSpeed JSON.
        shape: The model's shape.
        machine: The machine to tune for.
        host_bytes: Host memory of the machine that training may use.
        seq_len: Tokens in a sequence; None: the shape's `max_position_embeddings`, or `SEQ_LEN` if it has none.
        micro_batch: Sequences in a rank's micro-batch; None: the JSON's micro-batch, or several if the JSON has none.

    Raises:
        ConfigError: The "memplug" block has problems.
        TuneError: The fixed values contradict each other, or no configuration fits. In the second case the error names
            the least memory that a configuration needs.
    """
    block = read_ds_config(ds_config)
    fixed = Fixed.of(ds_config, block, micro_batch)
    if not 0 <= host_bytes < math.inf:
        raise TuneError(f"host memory is {host_bytes} bytes", "Give the machine's memory: 0 or a positive number.")
    tokens = seq_len or shape.fields.get("max_position_embeddings", SEQ_LEN)
    fixed.layouts()  # raises, before a model runs, if settings contradict each other
    sizes = {size for size, _ in fixed.batches(machine.gpus)}
    profiles = {size: profile(machine.hardware, shape, size, tokens) for size in sorted(sizes)}
    space = space_of(fixed, machine, profiles)
    estimator = StepEstimator(machine, profiles)
    device_bytes = granted_bytes(block.device_budget_gib, machine.hardware.memory_bytes)
    limits = MemoryLimits(device_bytes, host_bytes)
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
    """Describe a configuration in words, for an error."""
    layout = at.layout
    offload = {"none": "nothing", "optimizer": "the optimizer", "parameters": "optimizer and parameters"}
    return (
        f"ZeRO {layout.stage} with {offload[layout.offload]} offloaded, micro-batch {layout.micro_batch}, "
        f"accumulation {layout.accumulation}, n_persist {at.n_persist}, n_buffer {at.n_buffer}, n_swap {at.n_swap}, "
        f"n_checkpoint {at.n_checkpoint}"
    )


def _nothing_fits(boxes: tuple[Box, ...], estimator: StepEstimator, limits: MemoryLimits) -> TuneError:
    """Return the error that names the configurations with the least memory.

    The error names the configuration with the least device memory within the limit of host memory. Without this limit
    another configuration may take less device memory; then the error names both.
    """
    ways = [least_memory(boxes, estimator, limits)]
    unlimited = least_memory(boxes, estimator, MemoryLimits(limits.device_bytes, float("inf")))
    if unlimited[0] != ways[0][0]:
        ways.append(unlimited)
    least = "; or ".join(
        f"{made.device_bytes / GIB:.1f} GiB of the device and {made.host_bytes / GIB:.0f} GiB of the host, with "
        f"{configuration_words(at)}"
        for at, made in ways
    )
    return TuneError(
        f"no configuration fits {limits.device_bytes / GIB:.1f} GiB of a GPU and {limits.host_bytes / GIB:.0f} GiB of "
        f"the host: the least is {least}",
        "Use more GPUs, more host memory or a shorter sequence; or fix fewer values in the DeepSpeed JSON.",
    )
