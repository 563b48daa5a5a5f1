"""What the virtual device says of steps that were measured on an H200."""

from __future__ import annotations

import pytest

from tests.support.on_virtual.h200 import Measured, measured, predicted


@pytest.mark.parametrize("row", measured(), ids=str)
def test_a_step_takes_what_it_took_on_an_h200(row: Measured) -> None:
    found = predicted(row)
    assert found.step_s == pytest.approx(row.step_s, rel=0.03)
    assert found.peak_allocated_bytes == pytest.approx(row.peak_allocated_bytes, rel=0.02)
    if row.peak_reserved_bytes is not None and row.mode == "keep":
        assert found.peak_reserved_bytes == pytest.approx(row.peak_reserved_bytes, rel=0.04)
