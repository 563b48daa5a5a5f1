"""Megatron-Core with the stand-in of Transformer Engine's layers, tensor and context parallel.

All numbers are those without memplug, and units that communicate run again on all ranks or on none.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.megatron_ranks import MIXTURE, assert_same, assert_sound, block, train

pytestmark = pytest.mark.distributed

STEPS = 10
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor and sequence": {"tensor": 2, "sequence": True, "micro_batches": 2},
    "context": {"context": 2, "micro_batches": 2},
    "scales": {"tensor": 2, "sequence": True, "fields": {"fp8": "hybrid", "fp8_recipe": "delayed"}},
    "grouped experts": {"expert": 2, **MIXTURE, "fields": {"moe_grouped_gemm": True}},
}
FOUR: dict[str, dict[str, Any]] = {
    "context and tensor": {"context": 2, "tensor": 2, "sequence": True},
    "context and data": {"context": 2, "distributed_optimizer": True, "micro_batches": 2},
    "context and pipeline": {"context": 2, "pipeline": 2, "micro_batches": 4},
}
SHORT = {"short_of_host_memory": [1, 5]}
CASES: dict[str, dict[str, Any]] = {
    "0": block(0.0, arena=False),
    "1": block(1.0, arena=True),
    "auto": block("auto", arena=True),
    "1, short": {**block(1.0, arena=False), **SHORT},
    "auto, short": {**block("auto", arena=False), **SHORT},
}


def check(layout: dict[str, Any], names: tuple[str, ...], folder: Any, processes: int) -> None:
    layout = {"steps": STEPS, "transformer_engine": True, **layout}
    cases = {name: CASES[name] for name in names}
    ranks = train(folder, layout, {"without": None, **cases}, processes=processes)
    assert len(set(ranks[0]["without"]["digests"])) == layout["steps"], "it trains: every step differs"
    for name in names:
        for rank in ranks:
            assert_same(rank[name], rank["without"], exactly=name in ("0", "1"))
        assert_sound([rank[name] for rank in ranks])


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name == "scales" else pytest.mark.long) for name in LAYOUTS]
)
def test_losses_and_gradients_of_two_ranks_equal_those_without_memplug(layout: str, tmp_path: Any) -> None:
    check(LAYOUTS[layout], ("0", "1", "auto"), tmp_path, 2)


@pytest.mark.long
def test_ranks_with_different_plans_do_not_recompute_communicating_units(
    tmp_path: Any,
) -> None:
    # each rank has a plan of its own, so units that communicate must not run again
    check({**LAYOUTS["tensor and sequence"], "steps": 12}, ("auto, short",), tmp_path, 2)


@pytest.mark.long
@pytest.mark.parametrize("layout", FOUR)
def test_losses_and_gradients_of_four_ranks_equal_those_without_memplug(layout: str, tmp_path: Any) -> None:
    check(FOUR[layout], tuple(CASES), tmp_path, 4)
