"""Where the device has less room than a plan keeps, all ranks plan anew."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import memplug
from memplug.config import MemplugConfig
from memplug.device.device import CudaDevice
from memplug.stages.ranks import Ranks
from memplug.stages.table import Stage
from memplug.tokenwise import budgets
from memplug.tokenwise.room import Room
from tests.support.blocks import LAYERS, Stack, assert_same, gradients, twin

MIB = 1 << 20
CUDA = CudaDevice(0)


def decisions(kept_bytes: int, peak_bytes: int | None = 1000) -> SimpleNamespace:
    return SimpleNamespace(peak_bytes=peak_bytes, solution=SimpleNamespace(device_bytes=kept_bytes))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    said = {"retries": 3, "room": 500}

    def room(config: MemplugConfig, device: object, observed_peak_bytes: int) -> int:
        assert observed_peak_bytes == 400, "of the step at the safest setting"
        return said["room"]

    monkeypatch.setattr(budgets, "allocation_retries", lambda device: said["retries"])
    monkeypatch.setattr(budgets, "device_room_bytes", room)
    return said


def test_it_is_short_where_the_cache_had_to_be_emptied_and_the_plan_keeps_too_much(device: dict[str, int]) -> None:
    room = Room(MemplugConfig(enabled=True), CUDA, Ranks())
    room.is_short(None)
    assert not room.is_short(decisions(600)) and not room.is_short(decisions(600)), "no allocation had to wait"
    device["retries"] += 1
    assert not room.is_short(decisions(600)), "ranks agree a step later"
    assert room.is_short(decisions(600))
    assert not room.is_short(decisions(600)), "once for each time"


def test_a_plan_that_fits_stays_however_often_the_cache_is_emptied(device: dict[str, int]) -> None:
    room = Room(MemplugConfig(enabled=True), CUDA, Ranks())
    device["room"] = 600
    for _ in range(3):
        device["retries"] += 1
        assert not room.is_short(decisions(600))
    assert not room.is_short(decisions(600, peak_bytes=None)), "what the step needs besides is unknown"


def test_plans_are_forgotten_and_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
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
            assert session.stage is Stage.STABLE and session.report()["plain_regions"] == 3

        reach_stable(tokens=3)
        reach_stable()
        assert session.report()["replans"] == 2
        short[0] = True
        step()
        assert session.stage is Stage.WARM_UP and session.report()["plain_regions"] == 0
        assert "less room than its plan needs" in session.history[-1][-1]
        short[0] = False
        reach_stable()
        reach_stable(tokens=3)
        assert session.report()["programs"] == 2 and session.report()["replans"] == 4, "of the other program too"


@pytest.fixture
def other() -> Iterator[Other]:
    """Something else that takes the device's memory, past torch's allocator."""
    taken = Other()
    yield taken
    taken.give_back()


class Other:
    """Memory of the device, from the runtime itself."""

    def __init__(self) -> None:
        names = (None, "libcudart.so.13", "libcudart.so.12")
        self._runtime = next(lib for name in names if hasattr(lib := _library(name), "cudaMalloc"))
        self._memory: list[ctypes.c_void_p] = []

    def take_all_but(self, left_bytes: int) -> None:
        """Until so much is free."""
        free_bytes, _ = torch.cuda.mem_get_info()
        address = ctypes.c_void_p()
        assert self._runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(free_bytes - left_bytes)) == 0
        self._memory.append(address)

    def give_back(self) -> None:
        """All of it."""
        while self._memory:
            self._runtime.cudaFree(self._memory.pop())


def _library(name: str | None) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


@pytest.mark.gpu
def test_a_device_that_another_fills_keeps_less(other: Other) -> None:
    gc.collect()  # memory and peaks of tests that ran here before
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
        assert session.stage is Stage.STABLE and session.report()["plain_regions"] == 3
        torch.cuda.empty_cache()
        torch.empty(192 * MIB, dtype=torch.uint8, device="cuda")  # the allocator's cache has it now
        other.take_all_but(56 * MIB)  # short by more than what earlier tests may give back meanwhile
        step()
        step()
        assert session.stage is Stage.WARM_UP and session.report()["plain_regions"] == 0
        for _ in range(20):
            step()
        assert session.stage is Stage.STABLE and session.report()["plain_regions"] == 0
