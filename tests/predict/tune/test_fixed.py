"""The settings that a DeepSpeed JSON fixes, and the search space that it leaves."""

from __future__ import annotations

from typing import Any

import pytest

from memplug.config import parse_block, read_ds_config
from memplug.errors import TuneError
from memplug.predict.tune.estimate import chunks_of
from memplug.predict.tune.fixed import Fixed
from memplug.predict.tune.search import StepLayout
from memplug.predict.tune.space import FIXED, NOT_HIDDEN, free_box, space_of
from tests.predict.tune.models import machine, model

GPUS = machine(gpus=2, to_host=100.0, host_bytes_per_s=1000.0)
PROFILES = {size: model(micro_batch=size) for size in (1, 2, 4, 8, 16, 32)}


def fixed(zero: dict[str, Any] | None = None, micro_batch: int | None = None, **fields: Any) -> Fixed:
    config = {"zero_optimization": zero or {}, **fields}
    return Fixed.of(config, read_ds_config(config), micro_batch)


def layouts(given: Fixed) -> set[tuple[int, str]]:
    return {(box.layout.stage, box.layout.offload) for box in space_of(given, GPUS, PROFILES).boxes}


def test_tune_searches_absent_and_auto_settings_but_not_zero_0() -> None:
    auto = fixed(
        {"stage": "auto", "offload_optimizer": {"device": "auto"}, "stage3_max_reuse_distance": "auto"},
        train_batch_size="auto",
        train_micro_batch_size_per_gpu="auto",
        gradient_accumulation_steps="auto",
    )
    assert auto == fixed() == Fixed()
    every = {(stage, offload) for stage in (1, 2, 3) for offload in ("none", "optimizer")} | {(3, "parameters")}
    assert layouts(auto) == every
    space = space_of(auto, GPUS, PROFILES)
    assert FIXED not in space.ruled_out
    assert {box.layout.micro_batch for box in space.boxes} == {1, 2, 4, 8, 16, 32}


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        ({"stage": 2}, {(2, "none"), (2, "optimizer")}),
        ({"stage": 0}, {(0, "none")}),
        ({"offload_optimizer": {"device": "none"}}, {(1, "none"), (2, "none"), (3, "none")}),
        ({"offload_param": {"device": "cpu"}}, {(3, "parameters")}),
        ({"stage": 3, "offload_optimizer": {"device": "cpu"}}, {(3, "optimizer"), (3, "parameters")}),
        ({"stage": 2, "cpu_offload": True}, {(2, "optimizer")}),
        ({"stage": 2, "cpu_offload": False}, {(2, "none")}),
        ({"cpu_offload": True, "cpu_offload_param": True}, {(3, "parameters")}),
        (True, {(1, "none"), (1, "optimizer")}),
    ],
)
def test_tune_keeps_the_jsons_zero_stage_and_offload_devices(
    zero: dict[str, Any], expected: set[tuple[int, str]]
) -> None:
    assert layouts(fixed(zero)) == expected


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 2, "offload_param": {"device": "cpu"}},
        {"stage": 0, "offload_optimizer": {"device": "cpu"}},
        {"offload_optimizer": {"device": "none"}, "offload_param": {"device": "cpu"}},
    ],
)
def test_contradictory_zero_stage_and_offload_devices_are_refused(zero: dict[str, Any]) -> None:
    with pytest.raises(TuneError, match="contradict each other"):
        layouts(fixed(zero))


def test_torch_adam_that_deepspeed_cannot_offload_stays_on_the_device() -> None:
    torch_adam = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    assert {offload for _, offload in layouts(fixed(**torch_adam))} == {"none"}
    assert len(layouts(fixed(**torch_adam, zero_force_ds_cpu_optimizer=False))) == 7


def test_swap_list_of_optimizer_states_rules_out_optimizer_offload() -> None:
    block = {"enabled": True, "swap": {"states": True}}
    assert {offload for _, offload in layouts(fixed(memplug=block))} == {"none"}
    assert len(layouts(fixed(memplug={**block, "enabled": False}))) == 7


def test_training_batch_is_ranks_times_micro_batch_times_accumulation() -> None:
    assert fixed(train_batch_size=12).batches(2) == [(1, 6), (2, 3), (3, 2), (6, 1)]
    assert fixed(train_batch_size=12, gradient_accumulation_steps=2).batches(2) == [(3, 2)]
    assert fixed(train_batch_size=128, train_micro_batch_size_per_gpu=64).batches(2) == [(64, 1)]
    assert fixed(gradient_accumulation_steps=4, micro_batch=3).batches(2) == [(3, 4)]
    assert {accumulation for _, accumulation in fixed().batches(2)} == {1}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"train_batch_size": 9}, "9 is not divisible by 2 GPUs"),
        ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 4}, "2 GPUs and a micro-batch of 4"),
        ({"train_batch_size": 12, "gradient_accumulation_steps": 4}, "4 accumulation steps"),
    ],
)
def test_indivisible_batches_are_refused(fields: dict[str, int], said: str) -> None:
    with pytest.raises(TuneError, match=said):
        fixed(**fields).batches(2)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"bf16": {"enabled": False}}, "32 bits"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "NVMe"),
        ({"zero_optimization": {"stage": 4}}, "stage is 4"),
        ({"train_batch_size": "many"}, "train_batch_size is 'many'"),
        ({"train_micro_batch_size_per_gpu": 2}, "--micro-batch is 3"),
    ],
)
def test_configuration_that_tune_cannot_predict_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(TuneError, match=said):
        Fixed.of(config, parse_block({"enabled": True}), 3)


def test_fp16_is_treated_like_bf16() -> None:
    assert fixed(fp16={"enabled": True}, bf16={"enabled": False}) == Fixed()


def test_memplug_block_decides_how_many_layers_may_swap_and_recompute() -> None:
    def ranges(block: dict[str, Any]) -> tuple[int, int]:
        (box,) = space_of(fixed({"stage": 2}, 1, memplug=block, optimizer=ADAM), GPUS, PROFILES).boxes
        return box.n_swap.stop - 1, box.n_checkpoint.stop - 1

    ADAM = {"params": {"torch_adam": True}}
    on = {"enabled": True}
    assert ranges(on) == (4, 4)
    assert ranges({"enabled": False}) == ranges({**on, "tokenwise": {"enabled": False}}) == (0, 0)
    assert ranges({**on, "tokenwise": {"alpha": 0}}) == (0, 4)
    assert ranges({**on, "tokenwise": {"alpha": 1}}) == (4, 0)
    assert ranges({**on, "host_budget_gib": 100 / 2**30}) == (2, 4)


def test_ratio_fixes_persistent_chunks_and_reuse_distance_buffered_ones() -> None:
    zero = {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "ratio": 0.5},
        "offload_param": {"device": "none"},
        "stage3_max_reuse_distance": 45,
    }
    boxes = space_of(fixed(zero), GPUS, PROFILES).boxes
    assert {(box.n_persist, box.n_buffer) for box in boxes} == {(range(3, 4), range(2, 3))}


def test_searched_and_ruled_out_configurations_add_up_to_all() -> None:
    slow = machine(gpus=2)  # whose forward hides the copies of only one block
    space = space_of(fixed({"stage": 2}), slow, PROFILES)
    assert space.ruled_out[NOT_HIDDEN] > 0
    chunks = len(chunks_of(model()))
    assert chunks == 6
    every = 6 * sum(
        len(free_box(StepLayout(stage=stage, offload=offload, micro_batch=1, accumulation=1), model()))
        for stage, offload in layouts(Fixed())
    )
    assert sum(map(len, space.boxes)) + sum(space.ruled_out.values()) == every
