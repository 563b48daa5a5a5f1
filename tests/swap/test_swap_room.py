"""The share of the device budget that a swap list may use."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from memplug.device.memory import DeviceMemory
from memplug.device.reserved import Reserved, Served
from memplug.profile.trace import Trace
from memplug.swap.room import TIGHTER, ListRoom
from tests.support.traces import Recording

CPU = SimpleNamespace(kind="cpu", memory=None)


def room() -> ListRoom:
    return ListRoom(1000 / 2**30, CPU, Reserved(None))


class Counted(DeviceMemory):
    """A device of 1000 bytes, 920 of them for plans; at the peaks, 500 bytes were allocated and 625 reserved."""

    own_bytes, retries, reserved_bytes, holes_bytes = 1000, 0, 700, 70

    def _peaks(self) -> tuple[int, int]:
        return 500, 625


@pytest.fixture
def step() -> Trace:
    """Return a step with a collective on 40 bytes, and a matmul on 400."""
    recording = Recording()
    recording.step()
    recording.op("aten::mm", writes=(recording.tensor(400),))
    recording.op("c10d::allreduce_", reads=(recording.tensor(40),))
    return recording.trace()


def test_budget_of_list_excludes_the_largest_collective_tensor(step: Trace) -> None:
    assert room().budget_bytes == 1000 and room().of_list(step) == 960
    alone = Recording()
    alone.step()
    alone.op("aten::mm", writes=(alone.tensor(400),))
    assert room().of_list(alone.trace()) == 1000


def test_missing_bytes_tighten_the_budget_a_limited_number_of_times(step: Trace) -> None:
    tight = room()
    assert not tight.tighten(0) and tight.of_list(step) == 960
    assert [tight.tighten(10) for _ in range(TIGHTER + 1)] == [True] * TIGHTER + [False]
    assert tight.of_list(step) == 960 - 10 * TIGHTER
    tight.forget()
    assert tight.of_list(step) == 960 and tight.tighten(10)


def test_loosened_budget_has_no_reserve_and_cannot_be_tightened(step: Trace) -> None:
    tight = room()
    assert tight.of_list(step) == 960
    assert tight.loosen() and tight.of_list(step) == 1000
    assert not tight.loosen() and not tight.tighten(10)


def test_step_fits_exactly_if_no_request_failed() -> None:
    assert room().holds(was_short=False) and not room().holds(was_short=True)


def test_budget_of_list_counts_reserved_memory_as_tokenwise_does() -> None:
    """Without the arena, subtract torch's cache.

    With the arena, subtract holes; once a step has been measured, subtract its reserved bytes beyond the peak instead.
    """
    memory = Counted()
    device = SimpleNamespace(kind="cuda", memory=memory)
    without, served = Reserved(memory), Reserved(memory, lambda: Served(wanted=True, whole=True))
    assert ListRoom("auto", device, without).budget_bytes == 920 * 500 // 625
    assert ListRoom("auto", device, served).budget_bytes == 920 - 70
    assert served.measure(peak_bytes=600) == 700 and without.measure(peak_bytes=600) is None
    assert ListRoom("auto", device, served).budget_bytes == 920 - 100
    assert ListRoom("auto", device, served).holds(was_short=False)
    for reserved in (without, served):
        peak_bytes = reserved.largest_peak(920)
        assert peak_bytes + reserved.beside(peak_bytes) <= 920 < peak_bytes + 2 + reserved.beside(peak_bytes + 2)
