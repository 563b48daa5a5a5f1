"""Former names of DeepSpeed's settings are read as DeepSpeed reads them, compared with its own models."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed.runtime.precision_config import get_bfloat16_config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig, get_zero_config

from memplug.ds_json.keys import FORMER_OFFLOADS, RENAMED, SHORT, WITHOUT_EFFECT, offloads_of, present
from memplug.errors import ConfigError

FIELDS = DeepSpeedZeroConfig.model_fields


def zero_of(zero: Any, **fields: Any) -> Any:
    return present({"zero_optimization": zero, **fields})["zero_optimization"]


def meant(zero: Any) -> dict[str, Any]:
    """Return the section as DeepSpeed reads it, under present names, without offloads to "none"."""
    read = get_zero_config({"zero_optimization": zero})
    former = {*FORMER_OFFLOADS, *RENAMED, *WITHOUT_EFFECT}
    found = {key: getattr(read, key) for key in FIELDS if key not in former}
    for key in FORMER_OFFLOADS.values():
        found[key] = found[key].model_dump() if found[key] and found[key].device != "none" else None
    return found


def test_former_names_include_every_deprecated_name_of_deepspeed():
    deprecated = {
        key: field.json_schema_extra
        for key, field in FIELDS.items()
        if (field.json_schema_extra or {}).get("deprecated")
    }
    assert set(deprecated) == {*FORMER_OFFLOADS, *RENAMED, *WITHOUT_EFFECT}
    for former, name in {**FORMER_OFFLOADS, **RENAMED}.items():
        assert deprecated[former]["new_param"] in (name, name.removeprefix("stage3_"))
    assert all(deprecated[key]["set_new_param"] is False for key in WITHOUT_EFFECT)


def test_short_names_are_the_aliases_of_deepspeeds_fields():
    assert {key: field.alias for key, field in FIELDS.items() if field.alias} == SHORT


@pytest.mark.parametrize(
    "zero",
    [
        True,
        False,
        {},
        {"stage": 3},
        *({key: value} for key in FORMER_OFFLOADS for value in (True, False, None, "auto", "yes", 1)),
        {"cpu_offload": True, "cpu_offload_param": True, "cpu_offload_use_pin_memory": True, "stage": 3},
        {"cpu_offload": True, "offload_optimizer": "auto"},
        {"cpu_offload": "auto", "offload_optimizer": {"device": "cpu"}},
        {"stage3_gather_fp16_weights_on_model_save": True},
        {short: 1 for short in SHORT},
        {name: 1 for name in SHORT.values()},
        {"max_reuse_distance": 7, "stage3_max_reuse_distance": "auto"},
        {"stage3_max_reuse_distance": "auto", "max_reuse_distance": 7},
    ],
    ids=str,
)
def test_deepspeed_reads_present_names_like_former_ones(zero):
    found = zero_of(zero)
    assert meant(zero) == meant(found)
    assert not set(found) & {*FORMER_OFFLOADS, *RENAMED, *WITHOUT_EFFECT, *SHORT}
    assert zero_of(found) == found


@pytest.mark.parametrize(
    "zero",
    [
        {"cpu_offload": True, "offload_optimizer": {"device": "cpu"}},
        {"offload_optimizer": {"device": "cpu"}, "cpu_offload": False},
        {"cpu_offload": True, "offload_optimizer": None},
        {"stage3_gather_fp16_weights_on_model_save": True, "gather_16bit_weights_on_model_save": True},
        {"max_reuse_distance": 7, "stage3_max_reuse_distance": 7},
        {"cpu_offload_param": 2.5},
        [],
        None,
    ],
    ids=str,
)
def test_section_refused_by_deepspeed_is_a_config_error(zero):
    with pytest.raises((AssertionError, ValueError, TypeError)):
        get_zero_config({"zero_optimization": zero})
    with pytest.raises(ConfigError, match="zero_optimization"):
        zero_of(zero)


def test_setting_under_two_names_is_an_error_that_names_both():
    with pytest.raises(ConfigError, match="offload_param and cpu_offload_param are one setting"):
        zero_of({"offload_param": {"device": "none"}, "stage": 3, "cpu_offload_param": True})


@pytest.mark.parametrize("bf16", [None, {"enabled": True}, {"enabled": False}])
@pytest.mark.parametrize("bfloat16", [None, {"enabled": True}])
def test_bfloat16_section_counts_only_without_a_bf16_section(bf16, bfloat16):
    given = {key: value for key, value in {"bf16": bf16, "bfloat16": bfloat16}.items() if value is not None}
    assert get_bfloat16_config(given) == get_bfloat16_config(present(given))
    assert "bfloat16" not in present(given)


def test_renaming_keeps_auto_and_leaves_the_input_unchanged():
    given = {"train_batch_size": "auto", "zero_optimization": {"stage": "auto", "cpu_offload": True}}
    before = repr(given)
    expected = {"stage": "auto", "offload_optimizer": {"device": "cpu"}}
    assert present(given) == {"train_batch_size": "auto", "zero_optimization": expected}
    assert repr(given) == before


@pytest.mark.parametrize(
    ("zero", "named"),
    [
        ({"cpu_offload": True}, ["zero_optimization.cpu_offload"]),
        ({"cpu_offload": "no", "cpu_offload_param": "on"}, ["zero_optimization.cpu_offload_param"]),
        ({"cpu_offload": "auto", "offload_optimizer": {"device": "cpu"}}, ["zero_optimization.offload_optimizer: cpu"]),
        ({"offload_param": {"device": "auto"}, "offload_optimizer": "auto"}, []),
        (True, []),
    ],
)
def test_offloads_are_reported_under_the_names_in_the_users_file(zero, named):
    assert list(offloads_of({"zero_optimization": zero})) == named
