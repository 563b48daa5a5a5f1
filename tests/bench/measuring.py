"""Times a step and counts its memory, on each kind of device."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from tests.bench import memory
from tests.bench.cases import Case


class Measures(Protocol):
    """The measurements of one device."""

    def seconds(self, run: Any) -> float:
        """Return the seconds of one step of a `modes.Run`."""

    def reset_peaks(self) -> None:
        """Start counting."""

    def peaks(self, run: Any) -> tuple[int, int | None]:
        """Return the most bytes allocated, and reserved; runs one more step."""

    def unused(self) -> int | None:
        """Return the free bytes of segments that hold a tensor, which `free` cannot release; None: not counted."""

    def free(self) -> None:
        """Release the memory that no tensor uses."""


def of(case: Case) -> Measures:
    """Return the measurements of the case's device; make the virtual device if the case has one."""
    kind = case.device.partition(":")[0]
    return OnVirtual(case) if kind == "virtual" else OnCuda() if kind == "cuda" else OnCpu()


class OnCuda:
    """Measures with events and the counts of CUDA's allocator."""

    def seconds(self, run: Any) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        run.step()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3

    def reset_peaks(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def peaks(self, run: Any) -> tuple[int, int]:
        found = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        run.step()
        return found

    def unused(self) -> int:
        return torch.cuda.memory_stats()["inactive_split_bytes.all.current"]

    def free(self) -> None:
        torch.cuda.empty_cache()


class OnCpu:
    """Measures with the host's clock and the profiler's counts (tests/bench/memory.py)."""

    def seconds(self, run: Any) -> float:
        start = time.perf_counter()
        run.step()
        return time.perf_counter() - start

    def reset_peaks(self) -> None:
        pass

    def peaks(self, run: Any) -> tuple[int, None]:
        return memory.cpu_peak_bytes(run.step, run.slabs), None

    def unused(self) -> None:
        return None

    def free(self) -> None:
        pass


class OnVirtual:
    """Predicts, with the clocks and the allocator of the virtual device."""

    def __init__(self, case: Case):
        from memplug.predict.virtual import GpuProfile, VirtualDevice

        attention = None if case.attention == "default" else case.attention
        self.device = VirtualDevice(GpuProfile.named(case.gpu), attention=attention)

    def seconds(self, run: Any) -> float:
        began_s = self.device.synchronize()
        run.step()
        return self.device.synchronize() - began_s

    def reset_peaks(self) -> None:
        self.device.reset_peaks()

    def peaks(self, run: Any) -> tuple[int, int]:
        found = self.device.usage()
        run.step()
        return found.allocated_peak, found.reserved_peak

    def unused(self) -> None:
        return None

    def free(self) -> None:
        self.device.empty_cache()
