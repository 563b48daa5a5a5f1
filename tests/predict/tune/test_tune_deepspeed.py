"""Configurations as DeepSpeed JSON: new settings, unchanged settings, and DeepSpeed's reading of them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplug.config import read_ds_config
from memplug.predict.tune.deepspeed import buffered_within, deepspeed_json, ratio, reuse_distance, sub_groups
from memplug.predict.tune.estimate import chunks_of
from memplug.predict.tune.search import Configuration
from memplug.sizes import GIB
from tests.predict.tune.models import configuration, model

counts_of = st.lists(st.integers(1, 50), min_size=1, max_size=12)


def made(at: Configuration, ds_config: dict[str, Any] | None = None) -> dict[str, Any]:
    return deepspeed_json(
        ds_config or {},
        at,
        chunks_of(model()),
        gpus=2,
        hidden_size=4,
        device_budget_bytes=10 * GIB,
        host_budget_bytes=3.456 * GIB,
    )


def test_tuned_json_sets_batches_precision_zero_stage_and_budgets() -> None:
    found = made(configuration(2, "optimizer", micro_batch=4, accumulation=3))
    assert found["train_batch_size"] == 24 and found["train_micro_batch_size_per_gpu"] == 4
    assert found["gradient_accumulation_steps"] == 3 and found["bf16"] == {"enabled": True}
    zero = found["zero_optimization"]
    assert zero["stage"] == 2 and zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert "offload_param" not in zero and not any(key.startswith("stage3") for key in zero)
    assert found["memplug"] == {"enabled": True, "device_budget_gib": 10.0, "host_budget_gib": 3.45}
    assert read_ds_config(found).device_budget_gib == 10


def test_tuned_json_has_current_names_instead_of_deprecated_ones() -> None:
    given = {"bfloat16": {"enabled": True}, "zero_optimization": {"cpu_offload": True, "max_reuse_distance": 9}}
    found = made(configuration(3, "optimizer"), given)
    zero = found["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True} and "cpu_offload" not in zero
    assert zero["stage3_max_reuse_distance"] == 9 and "max_reuse_distance" not in zero
    assert found["bf16"] == {"enabled": True} and "bfloat16" not in found


def test_tuned_json_keeps_user_settings_and_replaces_auto() -> None:
    given = {
        "train_batch_size": "auto",
        "gradient_clipping": 1.0,
        "fp16": {"enabled": True},
        "zero_optimization": {
            "stage": "auto",
            "overlap_comm": False,
            "sub_group_size": 7,
            "stage3_prefetch_bucket_size": "auto",
            "offload_param": {"device": "auto"},
            "offload_optimizer": {"device": "none"},
        },
        "memplug": {"enabled": True, "device_budget_gib": 5, "tokenwise": {"alpha": "auto"}},
    }
    before = repr(given)
    found = made(configuration(3), given)
    assert repr(given) == before
    assert found["train_batch_size"] == 2 and found["gradient_clipping"] == 1.0
    assert found["fp16"] == {"enabled": True} and "bf16" not in found
    zero = found["zero_optimization"]
    assert (zero["stage"], zero["overlap_comm"], zero["sub_group_size"]) == (3, False, 7)
    assert zero["stage3_prefetch_bucket_size"] == 10 and "offload_param" not in zero
    assert zero["offload_optimizer"] == {"device": "none"}
    assert found["memplug"]["device_budget_gib"] == 5 and found["memplug"]["tokenwise"] == {"alpha": "auto"}


def test_buffered_chunks_set_max_reuse_distance_and_max_live_parameters() -> None:
    zero = made(configuration(3, n_buffer=2))["zero_optimization"]
    assert zero["stage3_max_reuse_distance"] == 2 * (10 + 10)
    assert zero["stage3_max_live_parameters"] == 20 + 2 * 10
    assert made(configuration(3))["zero_optimization"]["stage3_max_reuse_distance"] == 0


@given(counts_of)
def test_reuse_distance_determines_the_number_of_buffered_chunks(counts: list[int]) -> None:
    for buffered in range(len(counts) + 1):
        distance = reuse_distance(counts, buffered)
        assert buffered_within(counts, distance) == buffered
        assert buffered == 0 or buffered_within(counts, distance - 1) == buffered - 1


@given(counts_of)
def test_deepspeed_keeps_exactly_the_buffered_chunks(counts: list[int]) -> None:
    """Apply DeepSpeed's rule: a module stays if its next use is less than `reuse_distance` elements away."""
    order = [*range(len(counts)), *reversed(range(len(counts)))]
    for buffered in range(len(counts) + 1):
        stays = []
        for step in range(len(counts)):
            traversed, again = 0, set()
            for module in order[step + 1 :]:
                if traversed >= reuse_distance(counts, buffered):
                    break
                again.add(module)
                traversed += counts[module]
            stays.append(step in again)
        assert stays == [False] * (len(counts) - buffered) + [True] * buffered


def test_persistent_chunks_become_an_offload_ratio_of_sub_groups() -> None:
    zero = made(configuration(3, "optimizer", n_persist=3))["zero_optimization"]
    assert zero["sub_group_size"] == 5
    groups = sub_groups([4, 4, 2, 4, 2, 4, 2, 4, 2, 1, 5], 5)
    assert groups == [8, 6, 6, 6, 8] and sum(groups) == 34
    assert (
        int((1 - zero["offload_optimizer"]["ratio"]) * len(groups)) == 2
    )  # two groups with 14 elements, as many as a rank has of 3 chunks
    assert "ratio" not in made(configuration(3, "optimizer"))["zero_optimization"]["offload_optimizer"]


@given(counts_of, st.integers(0, 300))
def test_deepspeed_keeps_at_most_the_persistent_groups_on_the_device(groups: list[int], persisted: int) -> None:
    share = ratio(groups, persisted)
    on_device = int((1 - share) * len(groups))
    before = [0, *itertools.accumulate(groups)]
    assert 0 <= share <= 1 and before[on_device] <= persisted + 1
    assert on_device == len(groups) or before[on_device + 1] > persisted + 1


@given(counts_of, st.integers(1, 60))
def test_all_sub_groups_but_the_last_have_at_least_the_given_size(parameters: list[int], size: int) -> None:
    groups = sub_groups(parameters, size)
    assert sum(groups) == sum(parameters) and all(group >= size for group in groups[:-1])


@pytest.mark.parametrize("at", [configuration(1), configuration(3, "parameters", n_persist=2, n_buffer=3)])
def test_deepspeed_accepts_the_tuned_json(at: Configuration) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = DeepSpeedZeroConfig(**made(at)["zero_optimization"])
    assert zero.stage == at.layout.stage
    if at.layout.stage == 3:
        assert zero.max_reuse_distance == 60 and zero.offload_param.device == "cpu"
        assert 0 < zero.offload_optimizer.ratio < 1
