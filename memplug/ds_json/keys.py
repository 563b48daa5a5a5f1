"""Former names of settings in a DeepSpeed JSON, which DeepSpeed still reads, and the present names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from memplug.errors import ConfigError

FORMER_OFFLOADS = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
"""Former switches in "zero_optimization", and the sections that replaced them; true means {"device": "cpu"}."""
RENAMED = {"stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save"}
"""Former names in "zero_optimization", and the present names of the same values."""
WITHOUT_EFFECT = ("cpu_offload_use_pin_memory",)
"""Keys in "zero_optimization" that DeepSpeed accepts but never uses."""
SHORT = {
    key.removeprefix("stage3_"): key
    for key in (
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
        "stage3_model_persistence_threshold",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_gather_16bit_weights_on_model_save",
        "stage3_module_granularity_threshold",
        "stage3_use_all_reduce_for_fetch_params",
        "stage3_allgather_sequential",
    )
}
"""Keys in "zero_optimization" that may be given without the prefix "stage3_"."""

_FORMER_BUCKET = 500_000_000
_truth = TypeAdapter(bool | None).validate_python


def present(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with DeepSpeed's present names; values of former switches are converted.

    DeepSpeed ignores values of "auto". This function keeps them under present names, and drops them under former names.

    Args:
        ds_config: the content of a DeepSpeed JSON.

    Raises:
        ConfigError: a setting is given under both its former and its present name (DeepSpeed refuses that), or its
            value is invalid.
    """
    made = dict(ds_config)
    former = made.pop("bfloat16", None)
    if former is not None and made.get("bf16") is None:
        made["bf16"] = former
    if "zero_optimization" in made:
        made["zero_optimization"] = _present_zero(made["zero_optimization"], made)
    return made


def offloads_of(ds_config: Mapping[str, Any]) -> Iterator[str]:
    """Yield ZeRO's settings that offload to host memory or NVMe, as in "zero_optimization.offload_param: cpu".

    Args:
        ds_config: the content of a DeepSpeed JSON.

    Raises:
        ConfigError: see `present`.
    """
    given, zero = (config.get("zero_optimization") for config in (ds_config, present(ds_config)))
    if not zero:
        return
    for former, key in FORMER_OFFLOADS.items():
        section = zero.get(key)
        device = section.get("device", "none") if isinstance(section, Mapping) else "none"
        if device in ("none", "auto"):
            continue
        if former in given and given[former] != "auto":
            yield f"zero_optimization.{former}"
        else:
            yield f"zero_optimization.{key}: {device}{' with super_offload' if section.get('super_offload') else ''}"
    if isinstance(zero.get("zenflow"), Mapping):
        yield "zero_optimization.zenflow"


def _present_zero(zero: Any, ds_config: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(zero, bool):
        return (
            {"stage": 1, "allgather_bucket_size": ds_config.get("allgather_size", _FORMER_BUCKET)}
            if zero
            else {"stage": 0}
        )
    if not isinstance(zero, Mapping):
        raise ConfigError(
            [f"zero_optimization: got {zero!r}, not an object"],
            'Make it an object such as {"stage": 2}, or leave it out.',
        )
    made: dict[str, Any] = {}
    for key, value in zero.items():
        name = SHORT.get(key) or RENAMED.get(key) or FORMER_OFFLOADS.get(key) or key
        if key in WITHOUT_EFFECT or (value == "auto" and name != SHORT.get(key, key)):
            continue
        if name in made and made[name] != "auto" and value != "auto":
            raise ConfigError(
                [f"zero_optimization: {_both(zero, name)} are one setting"],
                f"DeepSpeed refuses both together: leave {name} and remove the other.",
            )
        if name not in made or value != "auto":
            made[name] = _device(key, value) if key in FORMER_OFFLOADS else value
    return made


def _both(zero: Mapping[str, Any], name: str) -> str:
    names = {**SHORT, **RENAMED, **FORMER_OFFLOADS}
    return " and ".join(key for key in zero if name in (key, names.get(key)))


def _device(key: str, value: Any) -> dict[str, str]:
    """Return the section that DeepSpeed makes from the former switch `key`."""
    try:
        offloads = _truth(value)
    except ValidationError:
        raise ConfigError([f"zero_optimization.{key}: got {value!r}; allowed: true or false"]) from None
    return {"device": "cpu" if offloads else "none"}
