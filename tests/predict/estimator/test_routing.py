"""The arena that is predicted for a mixture of experts, compared with that of a real training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.forking import launch_forked

pytest.importorskip("transformers")


@pytest.mark.parametrize("way", ["kept", pytest.param("token-wise", marks=pytest.mark.long)])
def test_predicted_arena_of_a_looped_mixtral_is_within_five_percent(way: str, tmp_path: Path) -> None:
    devices = "cpu", "virtual", "traced"
    for device in devices:
        launch_forked(["tests.support.routed_worker", device, tmp_path, way], processes=1, module=True)
    real, *predicted = (json.loads((tmp_path / f"{device}.json").read_text()) for device in devices)
    assert predicted == pytest.approx([real] * 2, rel=0.05)


@pytest.mark.long
@pytest.mark.parametrize(("routing", "ranks"), [("uniform", 1), ("uniform", 2), ("zipf", 2)])
def test_predicted_arena_of_a_megatron_mixture_is_within_5_percent(routing: str, ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    worker = "tests.support.routed_megatron_worker"
    launch_forked([worker, "cpu", tmp_path, routing, ranks], libraries="megatron", processes=ranks, module=True)
    launch_forked([worker, "virtual", tmp_path, routing, ranks], processes=1, module=True)
    real, predicted = (json.loads((tmp_path / f"{device}.json").read_text()) for device in ("cpu", "virtual"))
    assert min(real["room"], predicted["room"]) > 0
    assert predicted["bytes"] == pytest.approx(real["bytes"], rel=0.05)
