"""The DeepSpeed settings of an estimate: the user's JSON, except settings that the virtual device cannot run."""

from __future__ import annotations

from typing import Any

import pytest

from memplug.errors import EstimateError
from memplug.predict.estimator.engine import _refuse_as_deepspeed, dtype_of, micro_batch_of, settings_of

FUSED = {"torch_adam": True, "fused": True}


@pytest.mark.parametrize(
    ("params", "estimated"),
    [
        ({"lr": 1e-3}, {"lr": 1e-3, **FUSED}),
        ({"lr": 1e-3, "torch_adam": True}, {"lr": 1e-3, "torch_adam": True}),
        (FUSED, FUSED),
    ],
)
def test_estimate_replaces_only_deepspeeds_own_adam_by_torchs(
    params: dict[str, Any], estimated: dict[str, Any]
) -> None:
    settings = settings_of({"optimizer": {"type": "AdamW", "params": params}}, 1, 2)
    assert settings["optimizer"]["params"] == estimated


@pytest.mark.parametrize(
    ("batches", "micro_batch", "steps"),
    [
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, 4, 8),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto"}, 4, 8),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}, 4, 8),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, 16, None),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 4}, 4, None),
    ],
)
def test_accumulation_steps_are_set_if_they_follow_from_the_json(
    batches: dict[str, Any], micro_batch: int, steps: int | None
) -> None:
    settings = settings_of(batches, micro_batch, 2)
    assert settings.get("gradient_accumulation_steps") == steps
    assert settings["train_micro_batch_size_per_gpu"] == micro_batch and "train_batch_size" not in settings


@pytest.mark.parametrize(
    ("batches", "gpus", "micro_batch"),
    [
        ({"train_batch_size": 64}, 8, 8),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 4}, 8, 2),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": "auto"}, None, 1),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, 8, 4),
        ({"train_batch_size": "auto"}, 8, 1),
    ],
)
def test_micro_batch_follows_from_the_training_batch_as_in_deepspeed(
    batches: dict[str, Any], gpus: int | None, micro_batch: int
) -> None:
    assert micro_batch_of(batches, gpus) == micro_batch


def test_batch_not_divisible_by_the_ranks_is_refused() -> None:
    with pytest.raises(EstimateError, match="64, which cannot be split into 24"):
        micro_batch_of({"train_batch_size": 64, "gradient_accumulation_steps": 3}, 8)


@pytest.mark.parametrize(
    ("settings", "dtype", "section"),
    [
        ({}, "bf16", "bf16"),
        ({"memplug": {}}, "bf16", "bf16"),
        ({"zero_optimization": {"stage": 2}}, "fp32", None),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, "bf16", "bf16"),
        ({"bf16": "auto"}, "bf16", "bf16"),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": True}}, "fp16", "fp16"),
        ({"bfloat16": {"enabled": True}}, "bf16", "bf16"),
        ({"bfloat16": {"enabled": True}, "bf16": {"enabled": False}}, "fp32", None),
        ({"bf16": {"enabled": False}}, "fp32", None),
    ],
)
def test_dtype_is_deepspeeds_unless_the_json_is_empty_or_says_auto(
    settings: dict[str, Any], dtype: str, section: str | None
) -> None:
    assert dtype_of(settings) == dtype
    made = settings_of(settings, 1, 2)
    on = [name for name in ("bf16", "bfloat16", "fp16") if made.get(name, {}).get("enabled") is True]
    assert on == ([section] if section else [])


@pytest.mark.parametrize(
    "zero",
    [
        {"offload_param": {"device": "cpu"}},
        {"cpu_offload": True},
        {"stage": 3, "cpu_offload_param": True},
        {"offload_optimizer": {"device": "nvme"}},
        {"zenflow": {"topk_ratio": 0.1}},
    ],
)
def test_estimate_refuses_deepspeed_offload_to_the_host(zero: dict[str, Any]) -> None:
    with pytest.raises(EstimateError, match="leaves work to the host"):
        settings_of({"zero_optimization": zero}, 1, 2)
    settings_of({"zero_optimization": {"offload_optimizer": None, "offload_param": {"device": "none"}}}, 1, 2)


def test_refusal_of_a_configuration_quotes_deepspeeds_error() -> None:
    _refuse_as_deepspeed({"train_batch_size": 1, "zero_optimization": {"stage": 3}})
    with pytest.raises(EstimateError, match="DeepSpeed refuses the configuration: .*cpu_offload_params"):
        _refuse_as_deepspeed({"train_batch_size": 1, "zero_optimization": {"cpu_offload_params": True}})
