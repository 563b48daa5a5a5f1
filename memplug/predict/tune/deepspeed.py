"""A configuration as a DeepSpeed JSON.

ProTrain has four numbers; DeepSpeed and memplug have other ones. What each becomes, and what is lost:

| number | becomes | lost |
|---|---|---|
| `n_persist` | `offload_optimizer.ratio`, the share of sub-groups of `sub_group_size` elements that the host updates: DeepSpeed has the first ones on the device, as ProTrain | all gradients go by way of the host; parameters are offloaded all or none; groups may cut a block in two, so that the number is rounded down |
| `n_buffer` | `stage3_max_reuse_distance`, twice the elements of the last `n_buffer` chunks: those that backward uses again before so many others stay gathered; `stage3_max_live_parameters` has room for them, one that computes and one ahead | prefetching follows the order of the first step, not of chunks |
| `n_swap`, `n_checkpoint` | memplug's `device_budget_gib` and `host_budget_gib`, the limits that they were found under: memplug decides for each operator from measured rates (`tokenwise.alpha` is "auto" by default) | the numbers themselves |

`stage3_prefetch_bucket_size` and `reduce_bucket_size` are the largest chunk's elements;
`stage3_param_persistence_threshold` keeps norms whole on all ranks.
"""  # noqa: E501

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
"""Parameters of fewer elements than so many hidden sizes stay whole, as Hugging Face's integration has it."""


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
    """Returns the user's JSON with what a configuration sets; what is not "auto" in it stays, under present names.

    Args:
        chunks: of the model.
        device_budget_bytes: that a step may take of a rank's device.
        host_budget_bytes: that a rank may take of host memory for activations that are swapped.
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
    """Chunks, the last ones, that stay gathered at a reuse distance: the inverse of `reuse_distance`."""
    behind = itertools.accumulate(reversed(counts))
    return sum(2 * elements <= distance for elements in behind)


def reuse_distance(counts: Sequence[int], n_buffer: int) -> int:
    """In elements, that DeepSpeed goes from a module's forward to its backward, over all parameters behind it: less
    than this for the last `n_buffer` chunks, and not less for the others.

    Args:
        counts: elements of each chunk, in the order of the forward.
    """
    return 2 * sum(counts[len(counts) - n_buffer :])


def sub_groups(parameters: Sequence[int], size: int) -> list[int]:
    """Elements of each group as ZeRO 3 makes them: parameters in order, until there are `size` or more.

    Args:
        parameters: elements of each that one rank has.
    """
    groups, group = [], 0
    for count in parameters:
        group += count
        if group >= size:
            groups.append(group)
            group = 0
    return [*groups, group] if group else groups


def ratio(groups: Sequence[int], persisted: float) -> float:
    """Of the optimizer's states that the host has: the first groups that have no more elements than `persisted`
    together are on the device. DeepSpeed rounds `(1 - ratio) * groups` down: half a group more makes that safe.
    """
    on_device = sum(elements <= persisted + 1 for elements in itertools.accumulate(groups))
    return 1.0 if on_device == 0 else max(0.0, 1 - (on_device + 0.5) / len(groups))


def knows_ratio() -> bool:
    """Whether the installed DeepSpeed can have a part of the states on the host.

    Raises:
        TuneError: none is installed.
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
    """A section, which is made where there is none."""
    if not isinstance(config.get(key), dict):
        config[key] = {}
    return config[key]


def _set(config: dict[str, Any], key: str, value: Any) -> None:
    """Unless the user has."""
    if config.get(key, "auto") == "auto":
        config[key] = value


def _down(gib: float) -> float:
    return math.floor(gib * 100) / 100
