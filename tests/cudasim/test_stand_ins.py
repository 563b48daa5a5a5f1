"""The stand-ins of Transformer Engine and flash-attn queue their kernels on the current stream."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.launching import launch

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.distributed, pytest.mark.long]


CASES = ("layer", "ring", "megatron")


def test_stand_ins_compute_the_same_in_any_schedule_and_show_races(tmp_path: Path) -> None:
    launch(["tests.cudasim.stand_in_worker", tmp_path], module=True, time_limit_s=600)
    for rank in (0, 1):
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        for case in CASES:
            schedules = results[case]
            for schedule, found in schedules.items():
                assert found["numbers"] == schedules["eager"]["numbers"], f"{case}, {schedule}"
                assert found["violations"] == 0, f"{case}, {schedule}"
        assert results["ring_without_waits"]["lazy"]["violations"] > 0
        assert min(results["forwards"].values()) > 0
