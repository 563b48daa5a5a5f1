"""If the device has less room than a plan needs, all ranks plan again."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import memplug
from memplug.device.device import Device
from memplug.device.memory import DeviceMemory
from memplug.device.reserved import Reserved, Served
from memplug.session.ranks import Ranks
from memplug.session.table import Stage
from memplug.tokenwise.budgets import DeviceBudget
from memplug.tokenwise.room import Room
from tests.support.blocks import LAYERS, Stack, assert_same, gradients, twin

MIB = 1 << 20


class Planned(SimpleNamespace):
    """Decisions; unlike their base class they allow weak references."""


def decisions(kept_bytes: int, peak_bytes: int | None = 1000) -> Planned:
    return Planned(peak_bytes=peak_bytes, solution=SimpleNamespace(device_bytes=kept_bytes))


class Counted(DeviceMemory):
    """A device of 1000 bytes; plans may use the share `budgets.DEVICE_SHARE`."""

    own_bytes = 1000
    retries = 3
    reserved_bytes = 0
    holes_bytes = 0

    def _peaks(self) -> tuple[int, int]:
        return 500, 600


class Counting(Device):
    def __init__(self) -> None:
        self.memory = Counted()


def room_for(served: Served, budget_bytes: float | None = None) -> tuple[Room, Counted]:
    device = Counting()
    budget_gib = "auto" if budget_bytes is None else budget_bytes / 2**30
    reserved = Reserved(device.memory, lambda: served)
    return Room(DeviceBudget(device, budget_gib), Ranks(), reserved), device.memory


def test_room_without_the_arena_excludes_the_allocator_cache() -> None:
    room, memory = room_for(Served())
    memory.holes_bytes = 300
    assert room.of_step(400) == 920 - 400 - 80


def test_room_with_the_arena_excludes_holes_in_allocator_segments() -> None:
    room, memory = room_for(Served(wanted=True))
    assert room.of_step(400) == 920 - 400
    memory.holes_bytes = 70
    assert room.of_step(400) == 920 - 400 - 70
    assert room.of_step(None) == 920 - 600, "the step's peak is unknown"


def test_room_is_short_if_the_allocator_retried_and_the_plan_exceeds_it() -> None:
    room, memory = room_for(Served(wanted=True))
    plan = decisions(600)
    room.is_short(None)
    memory.own_bytes = 1100  # plans may use 1012 of them
    assert not room.is_short(plan) and not room.is_short(plan), "the allocator did not retry"
    memory.retries += 1
    assert not room.is_short(plan) and not room.is_short(plan), "the plan fits"
    memory.own_bytes = 1000
    assert not room.is_short(plan) and not room.is_short(plan), "the allocator did not retry since"
    memory.retries += 1
    assert not room.is_short(plan), "ranks agree a step later"
    assert room.is_short(plan)
    assert not room.is_short(plan), "each retry counts once"


def test_plan_that_fits_stays_when_the_allocator_retries() -> None:
    room, memory = room_for(Served(wanted=True))
    for peak_bytes in (900, 900, 900, None, None):
        memory.retries += 1
        assert not room.is_short(decisions(500, peak_bytes)), "the plan fits, or its peak is unknown"


def test_plan_is_remade_once_if_steps_reserve_more_than_the_budget() -> None:
    served = Served(wanted=True, whole=True)
    room, memory = room_for(served)
    first, second = decisions(500, 920), decisions(480, 900)
    assert room.of_step(420) == 500
    memory.reserved_bytes = 940
    assert not room.is_short(first)
    assert room.is_short(first)
    assert not room.is_short(first), "the plan is remade only once"
    assert room.of_step(420) == 480
    memory.reserved_bytes = 920
    assert not any(room.is_short(second) for _ in range(3)), "the plan foresaw the reserved bytes"


def test_plan_is_not_remade_before_the_arena_serves_a_whole_step() -> None:
    room, memory = room_for(Served(wanted=True))
    memory.reserved_bytes = 1000
    assert not any(room.is_short(decisions(500, 920)) for _ in range(3))
    assert room.of_step(420) == 500


def test_budget_overrun_that_no_plan_can_avoid_warns_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    room, memory = room_for(Served(wanted=True, whole=True), budget_bytes=900)
    memory.reserved_bytes, memory.holes_bytes = 950, 60
    assert not any(room.is_short(decisions(0, 850)) for _ in range(3))
    room.is_short(decisions(0, 850))
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        f'memplug: steps reserve 950 bytes of the device, although "device_budget_gib" is {900 / 2**30:g} and the plan '
        "keeps no outputs there"
    ]


def test_lack_of_room_makes_all_programs_plan_again(monkeypatch: pytest.MonkeyPatch) -> None:
    short = [False]
    monkeypatch.setattr(Room, "is_short", lambda self, decisions: short[0])
    model = Stack(3)
    block = {"enabled": True, "plan_dir": False, "device_budget_gib": 1, "arena": {"enabled": False}}
    with memplug.attach(model, {**block, "tokenwise": {"regions": LAYERS, "min_offload_bytes": 1}}) as session:

        def step(tokens: int = 6) -> None:
            model(torch.randn(2, tokens, 16)).backward()
            session.step()

        def reach_stable(tokens: int = 6) -> None:
            for _ in range(20):
                step(tokens)
            assert session.stage is Stage.STABLE and session.report().tokenwise.plain_regions == 3

        reach_stable(tokens=3)
        reach_stable()
        assert session.report().replans == 2
        short[0] = True
        step()
        assert session.stage is Stage.WARM_UP and session.report().tokenwise.plain_regions == 0
        assert "less room than its plan needs" in session.history[-1][-1]
        short[0] = False
        reach_stable()
        reach_stable(tokens=3)
        assert session.report().programs == 2 and session.report().replans == 4, (
            "the other program is planned again too"
        )


@pytest.fixture
def other() -> Iterator[Other]:
    """Yield a holder of device memory outside of torch's allocator."""
    taken = Other()
    yield taken
    taken.give_back()


class Other:
    """Device memory that the CUDA runtime gave directly, without torch."""

    def __init__(self) -> None:
        names = (None, "libcudart.so.13", "libcudart.so.12")
        self._runtime = next(lib for name in names if hasattr(lib := _library(name), "cudaMalloc"))
        self._memory: list[ctypes.c_void_p] = []

    def take_all_but(self, left_bytes: int) -> None:
        """Take memory until only `left_bytes` are free."""
        free_bytes, _ = torch.cuda.mem_get_info()
        address = ctypes.c_void_p()
        assert self._runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(free_bytes - left_bytes)) == 0
        self._memory.append(address)

    def give_back(self) -> None:
        """Free all the memory that was taken."""
        while self._memory:
            self._runtime.cudaFree(self._memory.pop())


def _library(name: str | None) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


@pytest.mark.gpu
def test_plan_keeps_less_after_another_process_fills_the_device(other: Other) -> None:
    gc.collect()  # else memory and peaks of earlier tests would count
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    model = Stack(3).cuda()
    reference = twin(model)
    block = {"enabled": True, "plan_dir": False, "arena": {"enabled": False}}
    with memplug.attach(model, {**block, "tokenwise": {"regions": LAYERS, "min_offload_bytes": 1}}) as session:

        def step() -> None:
            x = torch.randn(2, 6, 16, device="cuda")
            model(x).backward()
            reference(x).backward()
            assert_same(gradients(model), gradients(reference))
            torch.empty(240 * MIB, dtype=torch.uint8, device="cuda")
            session.step()

        for _ in range(20):
            step()
        assert session.stage is Stage.STABLE and session.report().tokenwise.plain_regions == 3
        torch.cuda.empty_cache()
        torch.empty(192 * MIB, dtype=torch.uint8, device="cuda")  # torch's allocator then has these bytes in its cache
        other.take_all_but(56 * MIB)  # too little for the plan, even if earlier tests' memory is freed now
        step()
        step()
        assert session.stage is Stage.WARM_UP and session.report().tokenwise.plain_regions == 0
        for _ in range(20):
            step()
        assert session.stage is Stage.STABLE and session.report().tokenwise.plain_regions == 0
