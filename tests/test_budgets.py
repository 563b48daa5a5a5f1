"""What a plan may use of the device, by what torch's allocator says; on a machine without one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from memplug.config import MemplugConfig
from memplug.device.device import Device
from memplug.profile import hardware
from memplug.tokenwise import budgets

GIB = 1 << 30
CUDA = SimpleNamespace(kind="cuda", torch_device=torch.device("cuda", 0))


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """80 GiB, of which other processes hold 10; the run reserved up to 40 for up to 32 of tensors, and holds 20 now."""
    said = {"free": 50 * GIB, "reserved": 20 * GIB, "most_reserved": 40 * GIB, "most_allocated": 32 * GIB}
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (said["free"], 80 * GIB))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: said["reserved"])
    monkeypatch.setattr("torch.cuda.max_memory_reserved", lambda device: said["most_reserved"])
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda device: said["most_allocated"])
    return said


def room_gib(peak_gib: float | None, budget_gib: float | str = "auto") -> float:
    config = MemplugConfig(enabled=True, device_budget_gib=budget_gib)
    peak_bytes = None if peak_gib is None else int(peak_gib * GIB)
    return budgets.device_room_bytes(config, CUDA, peak_bytes) / GIB


def test_what_other_processes_hold_and_a_margin_are_left_alone(allocator: dict[str, int]) -> None:
    assert room_gib(None) == pytest.approx(0.92 * 70 - 40)


def test_a_budget_counts_all_that_the_rank_holds_and_is_never_more_than_there_is(allocator: dict[str, int]) -> None:
    assert room_gib(None, 60.0) == pytest.approx(20)
    assert room_gib(None, 30.0) == 0
    assert room_gib(None, 500.0) == pytest.approx(30)


def test_the_peak_of_the_observed_step_counts_where_it_is_known_with_the_allocators_share(
    allocator: dict[str, int],
) -> None:
    """What an earlier plan kept, or loading the model took, is no part of the step that is planned from."""
    assert room_gib(32, 60.0) == pytest.approx(room_gib(None, 60.0)) == pytest.approx(20)
    assert room_gib(16, 60.0) == pytest.approx(40)


def test_on_the_cpu_nothing_is_kept_unless_it_is_asked_for() -> None:
    assert budgets.device_room_bytes(MemplugConfig(enabled=True), Device(), None) == 0
    assert budgets.device_room_bytes(MemplugConfig(enabled=True, device_budget_gib=2.0), Device(), None) == 2 * GIB
    assert budgets.peak_bytes(Device()) is None


def test_buffers_have_room_within_what_a_plan_may_fill_whatever_the_block_grants_to_kept_outputs(
    allocator: dict[str, int],
) -> None:
    assert budgets.has_room_for_buffers(CUDA, int((0.92 * 70 - 40) * GIB))
    assert not budgets.has_room_for_buffers(CUDA, int((0.92 * 70 - 40) * GIB) + GIB)
    assert budgets.has_room_for_buffers(Device(), 1 << 60)


def test_buffers_take_from_what_may_be_kept_where_no_arena_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "link_rates", lambda device: (2.0, 3.0))
    for arena, expected in ((True, 0), (False, 3)):
        config = MemplugConfig(enabled=True, tokenwise={"buffers": 3}, arena={"enabled": arena})
        assert budgets.budget(config, Device(), 100, None).buffers == expected


def test_the_link_is_measured_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    monkeypatch.setattr(hardware, "measure_links", lambda *args: measured.append(args) or (2.0, 3.0))
    hardware.link_rates.cache_clear()
    found = [budgets.budget(MemplugConfig(enabled=True), Device(), 100, None) for _ in range(2)]
    hardware.link_rates.cache_clear()
    assert len(measured) == 1 and [(one.d2h_bytes_per_s, one.h2d_bytes_per_s) for one in found] == [(2.0, 3.0)] * 2
