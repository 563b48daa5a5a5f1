"""If sizes of a list's tensors change from step to step, memplug plans a list of the others."""

from __future__ import annotations

import pytest
import torch

from tests.support.beside_plain import PEAK_BYTES, ROWS, WIDTH, Deep, Training, budget_gib

pytestmark = pytest.mark.device


class Partly(Deep):
    """Only a part of the rows passes through a layer that saves more than the others; `taken` is its number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.taken = ROWS // 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = self.expert(x[: self.taken])
        part = torch.nn.functional.gelu(part).square()
        return super().forward(x) + part.mean()


def test_new_list_leaves_out_tensors_whose_sizes_change() -> None:
    training = Training(budget_gib(PEAK_BYTES * 7 // 5), kind=Partly)
    training.until_it_swaps()
    for step in range(24):
        training.model.taken = training.plain.taken = ROWS // 2 + step % 5
        training.step()
    report = training.report
    assert report["swap"] == "swapping"
    missed = report["swap_missed"]
    for step in range(4):
        training.model.taken = training.plain.taken = ROWS // 2 - step
        training.step()
    assert training.report["swap_missed"] == missed
    assert training.report["swap_released_bytes"] > report["swap_released_bytes"]
