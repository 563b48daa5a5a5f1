"""Each wait between the swap list's copies and other work is needed: without it, the simulator finds a race.

tests/tokenwise/engine/test_races.py leaves out the waits of regions.
"""

from __future__ import annotations

import pytest
import torch

from memplug import native
from memplug.device.device import device_of
from memplug.device.host_pool import HostPool
from tests.cudasim import device
from tests.cudasim.device import SCHEDULES, scheduled
from tests.support.extension import Wait, leaving_out

pytestmark = pytest.mark.gpu

SLAB_BYTES, COUNT = 1 << 20, 4096
WAITS = [wait for wait in Wait if wait is not Wait.USE_FOR_COMPUTE]  # only copies of regions' rows have this wait


def unordered(missing: Wait | None) -> int:
    """Return how many accesses are unordered, over all schedules, while storages are offloaded and restored."""
    before = device.violations()
    for schedule in SCHEDULES:
        with scheduled(schedule):
            offload_and_restore(missing)
            torch.cuda.synchronize()
    return device.violations() - before


def offload_and_restore(missing: Wait | None) -> None:
    """Offload and restore storages around operators that write to them and to their former memory."""
    core, own = native.load(), device_of(torch.device("cuda"))
    pool = HostPool(own, SLAB_BYTES, core)
    pool.reserve(SLAB_BYTES)
    swapper = core.StorageSwapper(leaving_out(own.streams(core), missing), pool.slabs[0])
    core.load_swap_list([], [], b"", b"", b"", 1, [], swapper, core.device_type("cuda"))
    core.begin_swap_step()
    for _ in range(3):
        tensor = torch.full((COUNT,), 2.0, device="cuda").sin_()
        assert swapper.offload(tensor, 1)
        swapper.release(1)
        other = torch.zeros(COUNT, device="cuda").cos_()  # in the memory that the storage had
        del other
        swapper.prefetch(1)  # to the same memory
        tensor * 2
        assert swapper.offload(tensor, 2)
        tensor.add_(1)  # a write: the storage then stays on the device
        assert swapper.offload(tensor, 3)
        swapper.release(3)
        swapper.prefetch(3)
        del tensor  # while it is being prefetched
    assert core.end_swap_step()
    assert swapper.host_bytes == 0
    core.unload_swap_list()
    pool.close()


def test_storage_transfers_are_ordered() -> None:
    assert unordered(missing=None) == 0


@pytest.mark.unordered
@pytest.mark.parametrize("missing", WAITS, ids=lambda wait: wait.name.lower())
def test_missing_wait_of_a_storage_is_detected(missing: Wait) -> None:
    assert unordered(missing) > 0
