"""The virtual device's predictions of steps that were measured on an H200."""

from __future__ import annotations

import pytest

from tests.support.h200 import BY_DEFAULT, LLAMA, Measured, measured, predicted

MOST_TOKENS = 32768
"""The limit for Hugging Face's layers here; `tests.bench.against_h200` has the longer ones."""
ROWS = [row for row in measured() if row.attention != BY_DEFAULT and (row.layer != LLAMA or row.tokens <= MOST_TOKENS)]
BOUND_BY_PYTHON = (LLAMA, 8192, "selective")
"""A row of short operators: torch's selective recomputation asks Python about each, and the device waits."""


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_predicted_step_matches_h200_measurements(row: Measured) -> None:
    found = predicted(row)
    is_bound = (row.layer, row.tokens, row.mode) == BOUND_BY_PYTHON
    assert found.step_s == pytest.approx(row.step_s, rel=0.045 if is_bound else 0.03)
    if row.peak_allocated_bytes is not None:
        assert found.peak_allocated_bytes == pytest.approx(row.peak_allocated_bytes, rel=0.02)
    if row.peak_reserved_bytes is not None and row.mode == "keep":
        assert found.peak_reserved_bytes == pytest.approx(row.peak_reserved_bytes, rel=0.04)
