"""Writes a configuration of the search as a DeepSpeed JSON.

A configuration has ProTrain's four numbers, which count chunks and blocks (protrain.py). The settings of DeepSpeed and
memplug express these numbers only in part:

* `n_persist` becomes `offload_optimizer.ratio`. DeepSpeed splits parameters into sub-groups of `sub_group_size`
  elements; the CPU updates this fraction of the sub-groups. As in ProTrain, the first parameters are updated on the
  device. Unlike in ProTrain, all gradients pass through the host, and either all parameters are offloaded or none. If
  the last persistent chunk ends inside a sub-group, the CPU updates this sub-group.
* `n_buffer` becomes `stage3_max_reuse_distance`, which is twice the elements of the last `n_buffer` chunks. Parameters
  that backward uses again within this distance stay gathered. `stage3_max_live_parameters` has room for these chunks,
  the chunk that computes and the next one. Unlike ProTrain, DeepSpeed prefetches no chunks, but parameters, in the
  order in which the first step used them.
* `n_swap` and `n_checkpoint` become memplug's `device_budget_gib` and `host_budget_gib`, the memory limits under which
  the search found the numbers. The numbers themselves are lost: memplug decides for each operator from measured rates
  (`tokenwise.alpha` is "auto" by default).

`stage3_prefetch_bucket_size` and `reduce_bucket_size` are the elements of the largest chunk.
`stage3_param_persistence_threshold` keeps the weights of norms unsharded.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from memplug.ds_json.keys import present
from memplug.errors import TuneError
from memplug.predict.tune.estimate import IN_FLIGHT, Chunk
from memplug.predict.tune.search import Configuration
from memplug.sizes import GIB

PERSISTED_HIDDEN = 10
"""The size below which a parameter stays unsharded, in multiples of the hidden size; Hugging Face's is the same."""


def deepspeed_json(
    ds_config: Mapping[str, Any],
    at: Configuration,
    chunks: Sequence[Chunk],
    *,
    gpus: int,
    hidden_size: int,
    device_budget_bytes: float,
    host_budget_bytes: float,
) -> dict[str, Any]:
    """Return the user's JSON with the settings of a configuration, under DeepSpeed's current names.

    Only absent and "auto" values are set; all others stay as the user wrote them.

    Args:
        ds_config: The user's DeepSpeed JSON.
        at: The configuration.
        chunks: The model's chunks, in forward order.
        gpus: The number of ranks.
        hidden_size: The model's hidden size.
        device_budget_bytes: Device memory that a step may use on one rank.
        host_budget_bytes: Host memory that one rank may use for swapped activations.
    """
    layout = at.layout
    made = copy.deepcopy(present(ds_config))
    _set(made, "train_micro_batch_size_per_gpu", layout.micro_batch)
    _set(made, "gradient_accumulation_steps", layout.accumulation)
    _set(made, "train_batch_size", layout.micro_batch * layout.accumulation * gpus)
    if _part(made, "fp16").get("enabled") is not True:
        _set(_part(made, "bf16"), "enabled", True)
    if made["fp16"].get("enabled", "auto") == "auto":
        del made["fp16"]
    zero = _part(made, "zero_optimization")
    counts = [chunk.count for chunk in chunks]
    for key, value in {
        "stage": layout.stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": max(counts),
    }.items():
        _set(zero, key, value)
    for key, used in (
        ("offload_optimizer", layout.offload != "none"),
        ("offload_param", layout.offload == "parameters"),
    ):
        _offload(zero, key, used)
    if layout.stage == 3:
        _set_stage_3(zero, at, chunks, gpus, hidden_size)
    block = _part(made, "memplug")
    _set(block, "enabled", True)
    _set(block, "device_budget_gib", _down(device_budget_bytes / GIB))
    _set(block, "host_budget_gib", max(0.01, _down(host_budget_bytes / GIB)))
    return made


def _set_stage_3(zero: dict[str, Any], at: Configuration, chunks: Sequence[Chunk], gpus: int, hidden_size: int) -> None:
    counts = [chunk.count for chunk in chunks]
    distance = reuse_distance(counts, at.n_buffer)
    group = math.ceil(max(counts) / gpus)
    for key, value in {
        "stage3_max_reuse_distance": distance,
        "stage3_max_live_parameters": distance // 2 + IN_FLIGHT * max(counts),
        "stage3_prefetch_bucket_size": max(counts),
        "stage3_param_persistence_threshold": PERSISTED_HIDDEN * hidden_size,
        "sub_group_size": group,
    }.items():
        _set(zero, key, value)
    if at.layout.offload != "none" and at.n_persist and knows_ratio():
        size = zero["sub_group_size"]
        parameters = [math.ceil(n / gpus) for chunk in chunks for part in chunk.parts for n in part.parameters]
        persisted = sum(counts[: at.n_persist]) / gpus
        _set(_part(zero, "offload_optimizer"), "ratio", ratio(sub_groups(parameters, size), persisted))


def buffered_within(counts: Sequence[int], distance: float) -> int:
    """Return how many of the last chunks stay gathered at a reuse distance; the inverse of `reuse_distance`.

    Args:
        counts: Elements of each chunk, in forward order.
        distance: DeepSpeed's `stage3_max_reuse_distance`, in elements.
    """
    behind = itertools.accumulate(reversed(counts))
    return sum(2 * elements <= distance for elements in behind)


def reuse_distance(counts: Sequence[int], n_buffer: int) -> int:
    """Return a reuse distance at which exactly the last `n_buffer` chunks stay gathered.

    DeepSpeed's reuse distance of a module is the number of parameter elements that are used between the module's
    forward and its backward. This number is less than the result for the modules in the last `n_buffer` chunks, and for
    no others.

    Args:
        counts: Elements of each chunk, in forward order.
        n_buffer: The number of chunks that stay gathered.
    """
    return 2 * sum(counts[len(counts) - n_buffer :])


def sub_groups(parameters: Sequence[int], size: int) -> list[int]:
    """Return the number of elements of each sub-group that ZeRO 3 makes.

    A sub-group takes parameters in order until it has `size` elements or more.

    Args:
        parameters: Elements of each parameter's shard on one rank, in forward order.
        size: DeepSpeed's `sub_group_size`.
    """
    groups, group = [], 0
    for count in parameters:
        group += count
        if group >= size:
            groups.append(group)
            group = 0
    return [*groups, group] if group else groups


def ratio(groups: Sequence[int], persisted: float) -> float:
    """Return the `offload_optimizer.ratio`: the fraction of the optimizer's states that is on the host.

    The states of the first sub-groups stay on the device: as many sub-groups as have at most `persisted` elements
    together. DeepSpeed computes the number of these sub-groups by rounding `(1 - ratio) * len(groups)` down. The
    returned ratio makes this product half a sub-group too large, so that floating-point errors cannot change the
    rounded number.

    Args:
        groups: Elements of each sub-group.
        persisted: Elements whose optimizer states are to stay on the device.
    """
    on_device = sum(elements <= persisted + 1 for elements in itertools.accumulate(groups))
    return 1.0 if on_device == 0 else max(0.0, 1 - (on_device + 0.5) / len(groups))


def knows_ratio() -> bool:
    """Return whether the installed DeepSpeed can keep a part of the optimizer's states on the host.

    Raises:
        TuneError: DeepSpeed is not installed.
    """
    try:
        from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig
    except ImportError as error:
        raise TuneError(f"DeepSpeed cannot be imported: {error}", "Run `pip install 'memplug[deepspeed]'`.") from None
    return "ratio" in DeepSpeedZeroOffloadOptimizerConfig.model_fields


def _offload(zero: dict[str, Any], key: str, used: bool) -> None:
    if used:
        _set(_part(zero, key), "device", "cpu")
        _set(_part(zero, key), "pin_memory", True)
    elif isinstance(zero.get(key), dict) and zero[key].get("device") in ("auto", None) or zero.get(key) == "auto":
        del zero[key]


def _part(config: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a section of the JSON; add it if it is missing."""
    if not isinstance(config.get(key), dict):
        config[key] = {}
    return config[key]


def _set(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a key unless the user has set it to a value other than "auto"."""
    if config.get(key, "auto") == "auto":
        config[key] = value


def _down(gib: float) -> float:
    return math.floor(gib * 100) / 100
