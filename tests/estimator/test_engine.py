"""A DeepSpeed JSON as it is estimated: the run's own, but for what the virtual device does not run."""

from __future__ import annotations

from typing import Any

import pytest

from memplug.estimator.engine import settings_of

FUSED = {"torch_adam": True, "fused": True}


@pytest.mark.parametrize(
    ("params", "estimated"),
    [
        ({"lr": 1e-3}, {"lr": 1e-3, **FUSED}),
        ({"lr": 1e-3, "torch_adam": True}, {"lr": 1e-3, "torch_adam": True}),
        (FUSED, FUSED),
    ],
)
def test_torchs_adam_takes_the_place_of_deepspeeds_kernel_and_of_nothing_else(
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
def test_as_many_micro_batches_are_accumulated_as_in_the_run(
    batches: dict[str, Any], micro_batch: int, steps: int | None
) -> None:
    settings = settings_of(batches, micro_batch, 2)
    assert settings.get("gradient_accumulation_steps") == steps
    assert settings["train_micro_batch_size_per_gpu"] == micro_batch and "train_batch_size" not in settings
