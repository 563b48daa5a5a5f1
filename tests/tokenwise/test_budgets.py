"""The device memory that a plan may use according to torch's allocator, on a machine without a device."""

from __future__ import annotations

import pickle

import pytest

from memplug.device import hardware
from memplug.device.device import CudaDevice, Device
from memplug.device.reserved import Reserved
from memplug.errors import BudgetError
from memplug.tokenwise import budgets
from memplug.tokenwise.budgets import DeviceBudget

GIB = 1 << 30
CUDA = CudaDevice(0)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Fake a device of 80 GiB, 10 of which other processes hold.

    This process reserves 20 GiB now. At its peak it reserved 40 GiB, of which tensors used 32.
    """
    said = {"free": 50 * GIB, "reserved": 20 * GIB, "most_reserved": 40 * GIB, "most_allocated": 32 * GIB}
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (said["free"], 80 * GIB))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: said["reserved"])

    def stats(device: object) -> dict[str, int]:
        return {
            "allocated_bytes.all.peak": said["most_allocated"],
            "reserved_bytes.all.peak": said["most_reserved"],
        }

    monkeypatch.setattr("torch.cuda.memory_stats", stats)
    CUDA.memory.begin()
    return said


def room_gib(peak_gib: float | None, budget_gib: float | str = "auto", beside_gib: float = 0) -> float:
    peak_bytes = None if peak_gib is None else int(peak_gib * GIB)
    return DeviceBudget(CUDA, budget_gib).room_bytes(peak_bytes, int(beside_gib * GIB)) / GIB


def test_room_for_plans_excludes_other_processes_and_a_margin(allocator: dict[str, int]) -> None:
    assert room_gib(None) == pytest.approx(0.92 * 70 - 40)


def test_budget_covers_all_memory_of_the_rank_up_to_the_device_size(allocator: dict[str, int]) -> None:
    assert room_gib(None, 60.0) == pytest.approx(20)
    assert room_gib(None, 30.0) == 0
    assert room_gib(None, 500.0) == pytest.approx(30)


def test_plan_may_keep_what_step_peak_and_other_reserved_bytes_leave(
    allocator: dict[str, int],
) -> None:
    """The peak is that of the observed step, without memory of an earlier plan or of loading the model."""
    assert room_gib(32, 60.0) == pytest.approx(28)
    assert room_gib(32, 60.0, 8) == pytest.approx(room_gib(None, 60.0)) == pytest.approx(20)
    assert room_gib(32, 60.0, 40) == 0


def test_allocator_cache_is_extrapolated_from_the_run_so_far(allocator: dict[str, int]) -> None:
    reserved = Reserved(CUDA.memory)
    assert reserved.beside(32 * GIB) == 8 * GIB and reserved.beside(16 * GIB) == 4 * GIB
    assert reserved.largest_peak(40 * GIB) == 32 * GIB
    allocator["most_allocated"] = 41 * GIB
    CUDA.memory.begin()
    assert reserved.beside(16 * GIB) == 0 and reserved.largest_peak(40 * GIB) == 40 * GIB


def test_memory_peaks_survive_resets_by_the_training_script(allocator: dict[str, int]) -> None:
    memory = CudaDevice(0).memory
    memory.note()
    allocator |= {"most_reserved": 30 * GIB, "most_allocated": 2 * GIB}
    assert (memory.allocated_peak_bytes, memory.reserved_peak_bytes) == (32 * GIB, 40 * GIB)
    memory.begin()
    assert (memory.allocated_peak_bytes, memory.reserved_peak_bytes) == (2 * GIB, 30 * GIB)
    allocator["most_allocated"] = 3 * GIB
    assert memory.allocated_peak_bytes == 3 * GIB


def test_cpu_keeps_nothing_without_an_explicit_budget() -> None:
    asked = DeviceBudget(Device(), 2.0)
    assert DeviceBudget(Device()).room_bytes(GIB) == 0
    assert asked.room_bytes(GIB) == GIB
    assert asked.room_bytes(3 * GIB) == 0
    assert asked.room_bytes(None) == 2 * GIB, "the step's peak is unknown"
    assert budgets.peak_bytes(Device()) is None
    assert asked.nbytes == 2 * GIB
    assert DeviceBudget(Device()).nbytes is None


def require(*ranks: tuple[float | None, float | str]) -> None:
    """Check the budgets of ranks; each rank has its observed step's peak and its budget, in GiB."""
    everyone = [(int((peak_gib or 0) * GIB), budget_gib) for peak_gib, budget_gib in ranks]

    def gather(value: tuple[int, float | str]) -> list[tuple[int, float | str]]:
        assert value == everyone[0]
        return everyone

    peak_gib, budget_gib = ranks[0]
    peak_bytes = None if peak_gib is None else int(peak_gib * GIB)
    DeviceBudget(CUDA, budget_gib).require(peak_bytes, gather, range(len(ranks)))


def test_budget_error_names_the_least_possible_budget() -> None:
    with pytest.raises(BudgetError, match="is 2, and on rank 0 a step takes 17.3 GiB .*\n.* to 17.3 or more") as caught:
        require((17.2049, 2.0))
    assert caught.value.least_gib == 17.3
    assert pickle.loads(pickle.dumps(caught.value)).least_gib == 17.3
    require((17.2049, caught.value.least_gib))


@pytest.mark.parametrize("peak_gib", [1.0, 0.9999, 9.999, 123.4, 3.21e-5, 2**-20])
def test_least_budget_in_the_error_is_at_most_1_percent_above_the_peak(peak_gib: float) -> None:
    least_gib = BudgetError(peak_gib, 0, peak_gib / 2).least_gib
    assert peak_gib <= least_gib <= 1.01 * peak_gib


def test_budget_errors_of_all_ranks_name_the_rank_with_the_highest_peak() -> None:
    for ranks in ([(3.0, 4.0), (5.0, 4.0), (6.0, 4.0)], [(6.0, "auto"), (6.0, 5.0), (6.0, 4.0)]):
        with pytest.raises(BudgetError, match="is 4, and on rank 2 a step takes 6 GiB"):
            require(*ranks)


def test_budget_is_never_refused_if_automatic_or_the_peak_is_unknown() -> None:
    require((None, 1e-9), (None, 1e-9))
    require((1e6, "auto"), (None, 1.0))


def test_rounding_buffers_must_fit_into_the_room_for_plans(allocator: dict[str, int]) -> None:
    room_bytes = int((0.92 * 70 - 40) * GIB)
    assert DeviceBudget(CUDA).holds_buffers(2 * room_bytes, room_bytes, None)
    assert not DeviceBudget(CUDA).holds_buffers(2 * room_bytes, room_bytes + GIB, None)
    assert DeviceBudget(Device()).holds_buffers(1 << 60, 1 << 60, 1)


@pytest.mark.parametrize("device", [CUDA, Device()])
def test_step_with_buffers_keeps_to_the_budget(device: Device, allocator: dict[str, int]) -> None:
    budget = DeviceBudget(device, 30.0)
    assert budget.holds_buffers(10 * GIB, 10 * GIB, 20 * GIB)
    assert not budget.holds_buffers(10 * GIB + 1, 10 * GIB, 20 * GIB)
    assert budget.holds_buffers(10 * GIB + 1, 10 * GIB, None), "the step's peak is unknown"


def test_explicit_budget_counts_in_flight_bytes_and_needed_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Device, "link_rates", lambda device: (2.0, 3.0))
    for served, limit, expected in ((True, 1, (((3, 0),), 0)), (False, 1, (((3, 0),), 3)), (False, "auto", ((), 0))):
        budget = DeviceBudget(Device(), limit, has_buffers=not served).of_plan(100, 0, buffers=3)
        assert (budget.in_flight, budget.buffers) == expected


def test_link_rates_are_measured_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    monkeypatch.setattr(hardware, "measure_links", lambda *args: measured.append(args) or (2.0, 3.0))
    hardware.link_rates.cache_clear()
    found = [DeviceBudget(Device()).of_plan(100, 0, buffers=2) for _ in range(2)]
    hardware.link_rates.cache_clear()
    assert len(measured) == 1 and [(one.d2h_bytes_per_s, one.h2d_bytes_per_s) for one in found] == [(2.0, 3.0)] * 2
