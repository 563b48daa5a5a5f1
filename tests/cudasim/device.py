"""Counters and settings of the simulated device, for tests."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from memplug.device.device import CudaDevice
from tests.support.extension import Wait
from tests.support.simulated import LeavesOut

_library = ctypes.CDLL(None)  # the simulator's symbols come before all others
_library.cudasim_violations.restype = ctypes.c_longlong
_library.cudasim_tasks.restype = ctypes.c_longlong
_library.cudasim_blocked.restype = ctypes.c_longlong
_library.cudasim_memory_used.restype = ctypes.c_size_t
_library.cudasim_registered.restype = ctypes.c_size_t
_library.cudasim_pending.restype = ctypes.c_size_t


@dataclass(frozen=True)
class Schedule:
    """The order in which tasks run: "eager", "lazy", "copyfirst", "computefirst", or "random" by a seed."""

    policy: str
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.policy} {self.seed}" if self.policy == "random" else self.policy


SCHEDULES = [Schedule("eager"), Schedule("lazy"), Schedule("copyfirst"), Schedule("computefirst")]

used: collections.Counter[str] = collections.Counter()
"""How often each schedule was chosen."""


@contextlib.contextmanager
def scheduled(schedule: Schedule) -> Iterator[None]:
    """Run tasks of the device in this order; each change of the order first finishes all queued tasks."""
    former = current()
    used[str(schedule)] += 1
    _set(schedule)
    try:
        yield
    finally:
        _set(former)


def current() -> Schedule:
    """Return the schedule in force."""
    return _in_force[0]


_in_force = [Schedule(os.environ.get("CUDASIM_POLICY", "eager"), int(os.environ.get("CUDASIM_SEED", "0")))]


def _set(schedule: Schedule) -> None:
    _in_force[0] = schedule
    if _library.cudasim_set_policy(schedule.policy.encode(), ctypes.c_ulonglong(schedule.seed)) != 0:
        raise ValueError(f"there is no policy {schedule.policy}")


def violations() -> int:
    """Return the number of errors so far: unordered conflicting accesses, memory freed too early, wrong pointers."""
    return _library.cudasim_violations()


def tasks() -> int:
    """Return how many tasks were queued so far."""
    return _library.cudasim_tasks()


def pending() -> int:
    """Return how many queued tasks have not run."""
    return _library.cudasim_pending()


def blocked() -> int:
    """Return how often the host has had to wait for the device so far."""
    return _library.cudasim_blocked()


def memory_used_bytes() -> int:
    """Return the bytes of device memory that the driver has allocated."""
    return _library.cudasim_memory_used()


def registered() -> int:
    """Return how many pieces of the program's own host memory are registered with the driver."""
    return _library.cudasim_registered()


@contextlib.contextmanager
def memory_of(nbytes: int) -> Iterator[None]:
    """Limit the device to this much memory within the context."""
    before = _total_bytes()
    _library.cudasim_set_memory(ctypes.c_size_t(nbytes))
    try:
        yield
    finally:
        _library.cudasim_set_memory(ctypes.c_size_t(before))


@contextlib.contextmanager
def pinned_memory_of(nbytes: int) -> Iterator[None]:
    """Limit the host memory that can be registered within the context."""
    _library.cudasim_set_pinned(ctypes.c_size_t(nbytes))
    try:
        yield
    finally:
        _library.cudasim_set_pinned(ctypes.c_size_t(1 << 40))


def _total_bytes() -> int:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _library.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    return total.value


class ScheduledDevice(LeavesOut, CudaDevice):
    """memplug's CUDA device on the simulated runtime: in its context, copies run "late", "early" or at "random".

    Args:
        schedule: "late", "early" or "random".
        seed: Seed of "random".
        missing: A kind of wait that is left out everywhere.
    """

    POLICIES = {"late": "computefirst", "early": "copyfirst", "random": "random"}

    def __init__(self, schedule: str, seed: int = 0, missing: Wait | None = None):
        super().__init__(0)
        self.schedule = Schedule(self.POLICIES[schedule], seed)
        self.missing = missing
        self._scheduled = contextlib.ExitStack()
        self._before = violations()

    def __enter__(self) -> ScheduledDevice:
        self._scheduled.enter_context(scheduled(self.schedule))
        return self

    def __exit__(self, *exception: Any) -> None:
        self._scheduled.close()

    @property
    def violations(self) -> list[str]:
        """Return an entry for each violation since the device was made; stderr describes them."""
        return ["see above"] * (violations() - self._before)
