"""Megatron-Core's DeepEP functions: the exchanged tensors are captured, and the functions never run again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.forking import launch_forked
from tests.support.with_and_without import EXACT, assert_same, cases_of

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")
pytestmark = [pytest.mark.distributed, pytest.mark.long]

LAYERS = 3
PROGRAMS = {name: {"layer": name} for name in ("DeepEP", "HybridEP")}
CASES = cases_of(PROGRAMS, regions=["layers.*"])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("deep_ep")
    launch_forked(["tests.support.deep_ep_worker", folder, json.dumps(CASES)], libraries="megatron", module=True)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("alpha", EXACT)
@pytest.mark.parametrize("layer", PROGRAMS)
def test_losses_and_gradients_equal_plain_training_to_the_bit(
    layer: str, alpha: str, ranks: list[dict[str, Any]]
) -> None:
    for rank in ranks:
        assert_same(rank[f"{layer} none"], rank[f"{layer} {alpha}"])


@pytest.mark.parametrize("alpha", EXACT)
@pytest.mark.parametrize("layer", PROGRAMS)
def test_tokens_are_exchanged_once_and_no_region_is_opaque(layer: str, alpha: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        plain, found = rank[f"{layer} none"], rank[f"{layer} {alpha}"]
        assert found["calls"] == plain["calls"] == {"dispatch": 2 * LAYERS, "combine": 2 * LAYERS}
        assert found["report"]["opaque_regions"] == 0


@pytest.mark.parametrize("layer", PROGRAMS)
def test_exchanged_tensors_are_offloaded(layer: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank[f"{layer} 0"]["report"]["offloaded_bytes"] > 0, "the exchanged tensors are the only captures"
