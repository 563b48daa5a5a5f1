"""The estimators, compared with the virtual device."""

from __future__ import annotations

import pytest

from tests.predict.on_virtual.running import run_cases

FEW = "h100-7b-8-4096-4-0-4-1 or 4090-7b-3-2048-16-0-3-1 or h200-7b-8-32768-1-4-4-1"
"""One case that keeps, one that checkpoints, and one that swaps too."""


@pytest.mark.parametrize("cases", [FEW, pytest.param("test_", marks=pytest.mark.long)], ids=["few", "all"])
def test_tune_predictions_match_the_virtual_device(cases: str) -> None:
    run_cases("tune", "-k", cases)
