"""Measured steps are compared with the predictions of their swap list."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest

from memplug.swap.plan.part import SwapPart
from memplug.swap.promises import Promises
from tests.support.beside_plain import Training


def promises(told: list[tuple[str, int]], copies_itself: bool = False) -> Promises:
    part = SwapPart(predicted_peak_bytes=1000, predicted_stall_s=0.1, predicted_step_s=2.0)
    return Promises(part, lambda text, level: told.append((text, level)), copies_itself)


@pytest.mark.parametrize(("nbytes", "warnings"), [(900, 0), (1020, 0), (1030, 1)])
def test_peak_clearly_above_the_prediction_warns(nbytes: int, warnings: int) -> None:
    told: list[tuple[str, int]] = []
    list_of = promises(told)
    list_of.compare_peak(SimpleNamespace(live_bytes=np.array([10, nbytes, 20])))
    assert list_of.peak_bytes == nbytes
    assert [level for _, level in told] == [logging.WARNING] * warnings


@pytest.mark.parametrize(("stall_s", "copies_itself", "warnings"), [(0.19, False, 0), (0.21, False, 1), (9.0, True, 0)])
def test_stall_clearly_longer_than_predicted_warns_except_on_the_cpu(
    stall_s: float, copies_itself: bool, warnings: int
) -> None:
    told: list[tuple[str, int]] = []
    list_of = promises(told, copies_itself)
    list_of.compare_stall(None)
    assert list_of.stall_s is None and not told
    list_of.compare_stall(stall_s)
    assert list_of.stall_s == stall_s and len(told) == warnings


@pytest.mark.device
def test_report_has_measured_stall() -> None:
    training = Training()
    training.until_it_swaps()
    assert training.report["swap_stall_s"] is None
    for _ in range(4):
        training.step()
    report = training.report
    assert report["predicted_swap_stall_s"] is not None and report["swap_peak_bytes"] > 0
    assert report["swap_stall_s"] > 0, "CPU copies take time, and two device events never coincide"
