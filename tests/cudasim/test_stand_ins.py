"""The stand-ins of Transformer Engine and flash-attn queue their kernels on the current stream."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.launching import launch

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.distributed, pytest.mark.long]


def test_numbers_do_not_depend_on_the_schedule_and_nothing_is_unordered(tmp_path: Path) -> None:
    launch(["tests.cudasim.stand_in_worker", tmp_path], module=True, time_limit_s=600)
    for rank in (0, 1):
        for case, schedules in json.loads((tmp_path / f"{rank}.json").read_text()).items():
            for schedule, found in schedules.items():
                assert found["numbers"] == schedules["eager"]["numbers"], f"{case}, {schedule}"
                assert found["violations"] == 0, f"{case}, {schedule}"
