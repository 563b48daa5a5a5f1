"""Rows of any layout are copied asynchronously, each tensor by one copy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from memplug.device.device import CudaDevice
from memplug.device.host_pool import HostPool
from memplug.tokenwise.engine.core import core
from tests.cudasim import device
from tests.cudasim.device import SCHEDULES, Schedule, scheduled

pytestmark = pytest.mark.gpu

LAYOUTS: dict[str, Callable[[int], torch.Tensor]] = {
    "rows": lambda n: torch.randn(n, 8, device="cuda"),
    "transposed": lambda n: torch.randn(8, n, device="cuda").t(),
    "heads before tokens": lambda n: torch.randn(2, n, 4, 8, device="cuda").transpose(1, 2),
    "one of a batch": lambda n: torch.randn(1, n, 8, device="cuda"),
}


def offload_and_prefetch(layout: str, length: int, fraction: float) -> int:
    """Swap rows, check that they return unchanged and that the host never waits, and return the number of tasks."""
    pool = HostPool(CudaDevice(0), 1 << 30, core())
    transfer = core().Transfer(CudaDevice(0).streams(core()), pool.rows)
    pool.reserve(1 << 20)
    tensor = LAYOUTS[layout](length)
    expected = tensor.clone()
    rows = max(1, round(fraction * tensor.shape[0]))
    torch.cuda.synchronize()
    waited, before = device.blocked(), device.tasks()
    swapped = transfer.offload(tensor, rows)
    assert swapped is not None
    del tensor
    transfer.release([swapped])
    transfer.prefetch(swapped)
    back, valid = transfer.acquire(swapped)
    tasks = device.tasks() - before
    assert valid == rows and back.stride() == expected.stride()
    assert device.blocked() == waited
    assert torch.equal(back[:rows], expected[:rows])
    transfer.close()
    pool.close()
    return tasks


@pytest.mark.parametrize("schedule", [*SCHEDULES, Schedule("random", 1)], ids=str)
@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_any_layout_are_swapped_without_host_waits(layout: str, fraction: float, schedule: Schedule) -> None:
    with scheduled(schedule):
        offload_and_prefetch(layout, 16, fraction)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_tensor_takes_as_few_copies_as_a_small_one(layout: str) -> None:
    assert offload_and_prefetch(layout, 1 << 16, 1.0) == offload_and_prefetch(layout, 16, 1.0)
