"""A device whose copies run as late, as early or in as odd an order as its events allow; tensors live on the CPU.

Operators of the test run at once, in program order: they are the compute stream. A copy is queued, and runs

* `late`: only when its event is waited for,
* `early`: as soon as all that it waits for is done,
* `random`: at any moment between the two; the seed also sets how late it tends to be.

An error that real hardware could make shows up as poison (all bits set: NaN in every float) or in `violations`:

* a copy that does not wait for the operators queued before it could run ahead of them: it delivers poison;
* a copy whose source was released before it ran reads memory that is in other use by then: it delivers poison;
* a copy whose destination was released before it ran writes into memory that is in other use by then: a violation;
* new device memory and new host memory are poisoned, so that a read before the copy shows.

`missing` leaves out one kind of wait, everywhere.
"""

from __future__ import annotations

import collections
import os
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memplug.device.device import CudaDevice, Device
from memplug.tokenwise.engine.operators import tensors_in
from memplug.tokenwise.engine.tape import storage_of
from tests.support.extension import Wait, leaving_out, python_streams, waits

if TYPE_CHECKING:
    from tests.cudasim.device import ScheduledDevice

Adversary: TypeAlias = "SimulatedDevice | ScheduledDevice | UnscheduledDevice"
COMPUTE = "compute"


def adversarial_device(schedule: str, seed: int = 0, missing: Wait | None = None) -> Adversary:
    """Return a `SimulatedDevice`; on simulated CUDA the device with that schedule, on a GPU the device as it is."""
    if torch.get_default_device().type == "cpu":
        return SimulatedDevice(schedule, seed, missing)
    if not cuda_is_simulated():
        if missing is not None:
            pytest.skip("a GPU need not show what a missing wait allows")
        return UnscheduledDevice(0)
    from tests.cudasim.device import ScheduledDevice

    return ScheduledDevice(schedule, seed, missing)


def cuda_is_simulated() -> bool:
    """Return whether the simulated runtime is loaded (tests/cudasim/plugin.py)."""
    return "libcudasim" in os.environ.get("LD_PRELOAD", "")


@dataclass
class Event:
    """An event: on the compute stream the time of its recording, on a copy stream whether the queue has passed it."""

    clock: int = -1
    stream: Stream | None = None
    done: bool = False


@dataclass
class Stream:
    """A copy stream: its queue, and the compute time that its next entry is ordered after."""

    queue: collections.deque[Any] = field(default_factory=collections.deque)
    seen: int = -1


class WeakTensor:
    """A tensor's place in memory, which does not keep the memory alive, like a pointer in a queued copy."""

    def __init__(self, tensor: torch.Tensor):
        self.storage = torch.UntypedStorage._weak_ref(tensor.untyped_storage())
        self.layout = (tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())

    def get(self) -> torch.Tensor | None:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage)
        if storage is None:
            return None
        dtype, offset, size, stride = self.layout
        return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)

    def __del__(self) -> None:
        torch.UntypedStorage._free_weak_ref(self.storage)


class ScriptedDevice(Device):
    """The CPU, with streams, events and copies in Python, which subclasses implement."""

    def streams(self, core: Any) -> Any:
        return python_streams(self)

    def new_stream(self) -> Any:
        return None

    def compute_stream(self) -> Any:
        return None

    def record(self, stream: Any) -> Any:
        return None

    def wait(self, stream: Any, event: Any) -> None:
        pass

    def copy(self, stream: Any, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source)

    def empty(self, stream: Any, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype)


class LeavesOut(Device):
    """A wrapper of another device's streams that counts its waits, and leaves out those of kind `missing`."""

    missing: Wait | None = None
    _native: Any = None

    def streams(self, core: Any) -> Any:
        self._native = leaving_out(super().streams(core), self.missing)
        return self._native

    def asked_for(self, why: Wait) -> int:
        """Return how often the streams were asked for a kind of wait."""
        return waits(self._native, why)


class UnscheduledDevice(LeavesOut, CudaDevice):
    """A GPU whose copies run at their own time, without checks."""

    violations: tuple[str, ...] = ()

    def __enter__(self) -> UnscheduledDevice:
        return self

    def __exit__(self, *exception: Any) -> None:
        pass


class SimulatedDevice(LeavesOut, ScriptedDevice):
    """A context manager around the code under test (see the module): operators inside tick the compute clock."""

    def __init__(self, schedule: str, seed: int = 0, missing: Wait | None = None):
        self.schedule = schedule
        self.random = random.Random(seed)
        self._eagerness = self.random.random() ** 3
        self.clock = 0
        self.missing = missing
        self._streams: list[Stream] = []
        self.violations: list[str] = []
        self.copying = False
        self._ticker = _Ticker(self)

    def __enter__(self) -> SimulatedDevice:
        self._ticker.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._ticker.__exit__(*exception)

    # -- Device ----------------------------------------------------------------------------------------------------

    def new_stream(self) -> Stream:
        self._streams.append(Stream())
        return self._streams[-1]

    def compute_stream(self) -> str:
        return COMPUTE

    def record(self, stream: Any) -> Event:
        self._shuffle()
        if stream is COMPUTE:
            return Event(clock=self.clock)
        event = Event(stream=stream)
        stream.queue.append(event)
        return event

    def wait(self, stream: Any, event: Event) -> None:
        self._shuffle()
        if stream is COMPUTE:
            self._finish(event)
        elif event.stream is None:
            stream.seen = max(stream.seen, event.clock)
        else:
            stream.queue.append(("wait", event))

    def copy(self, stream: Any, destination: torch.Tensor, source: torch.Tensor) -> None:
        if stream is COMPUTE:
            destination.copy_(source)
            return
        ordered = stream.seen >= self.clock
        stream.queue.append((WeakTensor(destination), WeakTensor(source), ordered))
        self._shuffle()
        if self.schedule == "early":
            self._advance(stream, len(stream.queue))

    def empty(self, stream: Any, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return poison(super().empty(stream, size, stride, dtype))

    def pin(self, buffer: torch.Tensor) -> bool:
        poison(buffer)
        return True

    def synchronize(self) -> None:
        for stream in self._streams:
            self._advance(stream, len(stream.queue))

    # -- the copies ------------------------------------------------------------------------------------------------

    def _shuffle(self) -> None:
        if self.schedule == "random":
            for stream in self._streams:
                if stream.queue and self.random.random() < self._eagerness:
                    self._advance(stream, self.random.randint(0, len(stream.queue)))
        elif self.schedule == "early":
            for stream in self._streams:
                self._advance(stream, len(stream.queue))

    def _finish(self, event: Event) -> None:
        while event.stream is not None and not event.done:
            self._step(event.stream)

    def _advance(self, stream: Stream, count: int) -> None:
        for _ in range(count):
            self._step(stream)

    def _step(self, stream: Stream) -> None:
        entry = stream.queue.popleft()
        if isinstance(entry, Event):
            entry.done = True
        elif entry[0] == "wait":
            self._finish(entry[1])
        else:
            self.copying = True
            self._copy(*entry)
            self.copying = False

    def _copy(self, destination: WeakTensor, source: WeakTensor, ordered: bool) -> None:
        target, origin = destination.get(), source.get()
        if target is None:
            self.violations.append("a copy wrote into released memory")
        elif origin is None or not ordered:
            poison(target)
        else:
            target.copy_(origin)


class _Ticker(TorchDispatchMode):
    """Moves the compute clock on at every operator that touches memory."""

    def __init__(self, device: SimulatedDevice):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.device.copying and not _is_view(args, out):
            self.device.clock += 1
        return out


def _is_view(args: Any, out: Any) -> bool:
    outputs = [t for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, torch.Tensor)]
    inputs = {storage_of(t) for t in tensors_in(args)}
    return bool(outputs) and all(storage_of(t) in inputs for t in outputs)


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Set all bits of a tensor: NaN for every floating dtype, -1 for integers."""
    if tensor.numel():
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        flat = tensor.detach().as_strided((span,), (1,), tensor.storage_offset())
        if span == tensor.numel():
            flat.view(torch.uint8).fill_(0xFF)
        else:
            tensor.detach().fill_(float("nan") if tensor.is_floating_point() else -1)
    return tensor
