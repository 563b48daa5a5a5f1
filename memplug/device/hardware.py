"""Measures this machine: rates of copies, of pinned allocation and of a matmul, and free memory."""

import functools
import logging
import platform
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from memplug.errors import coded
from memplug.sizes import MIB

_log = logging.getLogger("memplug")

_REPEATS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Measured rates and capacities of one device and its host.

    Attributes:
        device_name: name from the driver, or from the platform for the CPU.
        d2h_bytes_per_s: copy rate from device to pinned host memory, while the other direction runs too.
        h2d_bytes_per_s: copy rate from pinned host memory to device, while the other direction runs too.
        pinned_alloc_bytes_per_s: rate of allocating, touching and, except on the CPU, registering host memory.
        matmul_flops_per_s: rate of a large square matmul, 2·n³ operations: bf16 on CUDA (fp16 if bf16 is emulated),
            fp32 on the CPU.
        host_available_bytes: see the function `host_available_bytes`.
        device_free_bytes: device memory that is free for this process now; on the CPU, the host's.
        device_total_bytes: size of the device's memory; on the CPU, of the host's.
        memlock_limit_bytes: this process's limit on locked memory; None if there is none.
    """

    device_name: str
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    pinned_alloc_bytes_per_s: float
    matmul_flops_per_s: float
    host_available_bytes: int
    device_free_bytes: int
    device_total_bytes: int
    memlock_limit_bytes: int | None


def measure(device: torch.device | str) -> Hardware:
    """Measure a device and its host; each rate is the median of several runs. Takes less than 2 s on the CPU.

    The global random state is not touched. On CUDA the measurement waits for work in flight, and needs 1 GiB of device
    memory and 0.5 GiB of host memory.

    Args:
        device: "cpu" or a CUDA device.

    Raises:
        ValueError: the device is neither.
        OSError: the system is not Linux: there is no /proc/meminfo.
    """
    device = _checked(device)
    # Read the capacities first: the measurements leave cached blocks behind.
    available = host_available_bytes()
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        name, link_bytes = torch.cuda.get_device_name(device), 256 * MIB
    else:
        free, total = available, max(available, _meminfo_bytes(Path("/proc/meminfo"), "MemTotal"))
        # The copies must exceed the CPU's caches; touching 64 MiB still takes only a fraction of a second.
        name, link_bytes = platform.processor() or platform.machine(), 64 * MIB
    pinned = _pinned_alloc_bytes_per_s(device)
    d2h, h2d = measure_links(device, link_bytes)
    return Hardware(
        device_name=name,
        d2h_bytes_per_s=d2h,
        h2d_bytes_per_s=h2d,
        pinned_alloc_bytes_per_s=pinned,
        matmul_flops_per_s=_matmul_flops_per_s(device),
        host_available_bytes=available,
        device_free_bytes=free,
        device_total_bytes=total,
        memlock_limit_bytes=_memlock_limit_bytes(),
    )


def measure_links(
    device: torch.device | str, size_bytes: int = 256 * MIB, *, together: bool = True
) -> tuple[float, float]:
    """Measure the copy bandwidth between device and host, in both directions at once or in each alone.

    On CUDA the host's buffers are pinned, and each direction has its own stream. The CPU has no link: its rates are
    those of copies within host memory, two at a time if `together`.

    Args:
        device: "cpu" or a CUDA device.
        size_bytes: size of one copy in bytes, at least 1; each side has two buffers of this size.
        together: True to run both directions at once, False to run one after the other.

    Returns:
        The copy rates (device to host, host to device) in bytes per second, each the median of several copies.

    Raises:
        ValueError: the device is neither, or the size is below 1.
    """
    device = _checked(device)
    if size_bytes < 1:
        raise ValueError(f"size_bytes must be at least 1, got {size_bytes}")
    on_device = [torch.ones(size_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    with _pinned(size_bytes, device) as to_host, _pinned(size_bytes, device) as from_host:
        copies = [(to_host, on_device[0]), (on_device[1], from_host)]
        turns = [copies] if together else [[each] for each in copies]
        d2h_s, h2d_s = (seconds for turn in turns for seconds in _copy_s(turn, device))
    return size_bytes / d2h_s, size_bytes / h2d_s


@functools.cache
def link_rates(device: torch.device) -> tuple[float, float]:
    """Return the copy rates (device to host, host to device) in bytes per second, while both directions run.

    The rates are measured once, since the link of a running job does not change. This takes a third of a second on a
    CPU.

    Args:
        device: the CPU or a CUDA device.

    Raises:
        ValueError: the device is neither.
    """
    size_bytes = 64 * MIB
    if device.type == "cuda":  # do not raise the program's own peak of allocated memory
        room_bytes = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
        size_bytes = min(size_bytes, max(MIB, room_bytes // 2))
    while True:
        try:
            return measure_links(device, size_bytes)
        except torch.OutOfMemoryError:
            if size_bytes <= MIB:
                raise
            size_bytes //= 2


def host_available_bytes(root: Path = Path("/")) -> int:
    """Return the host memory that new allocations can use without swapping, in bytes.

    This is the kernel's MemAvailable, or less if this process's control groups (v1 or v2) leave less. Inside a
    container, MemAvailable is the whole machine's. Page cache that the kernel can drop counts as available.

    Args:
        root: the folder where `proc` and `sys` are mounted.

    Raises:
        OSError: the system is not Linux: there is no /proc/meminfo.
    """
    available = _meminfo_bytes(root / "proc/meminfo", "MemAvailable")
    return max(0, min([available, *_cgroup_room_bytes(root)]))


def _checked(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"can measure cpu and cuda, got {device}")
    return device


@contextmanager
def _pinned(size_bytes: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Provide touched host memory (uint8), on CUDA registered with the driver.

    With `pin_memory=True`, torch would keep the memory pinned, rounded up to a power of two, for the rest of the run.
    """
    block = torch.ones(size_bytes, dtype=torch.uint8)
    if device.type != "cuda":
        yield block
        return
    with torch.cuda.device(device):
        cudart = torch.cuda.cudart()
        registered = int(cudart.cudaHostRegister(block.data_ptr(), size_bytes, 0)) == 0
        if not registered:
            text = (
                "the driver refused to register host memory: copies are measured with unpinned memory, and are slow. "
                "Raise the limit on locked memory (`ulimit -l unlimited`)"
            )
            _log.warning(coded("MP018", text))
            # CUDA keeps the refusal as its last error, which the next kernel launch raises: launch one here.
            with suppress(RuntimeError):
                torch.zeros(1, device=device)
        try:
            yield block
        finally:
            if registered:
                torch.cuda.synchronize()
                cudart.cudaHostUnregister(block.data_ptr())


def _copy_s(copies: list[tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> list[float]:
    return _cuda_copy_s(copies, device) if device.type == "cuda" else _cpu_copy_s(copies)


def _cuda_copy_s(copies: list[tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> list[float]:
    """Return the median seconds of a copy for each (destination, source); all pairs are copied at the same time."""
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in copies]
        marks: list[list[torch.cuda.Event]] = [[] for _ in copies]
        for repeat in range(_REPEATS + 1):
            for stream, (destination, source), events in zip(streams, copies, marks, strict=True):
                with torch.cuda.stream(stream):
                    # The first copy is not timed: it may run alone until the other direction's copy is launched.
                    if repeat:
                        events.append(torch.cuda.Event(enable_timing=True))
                        events[-1].record()
                    destination.copy_(source, non_blocking=True)
                    if repeat == _REPEATS:
                        events.append(torch.cuda.Event(enable_timing=True))
                        events[-1].record()
        torch.cuda.synchronize()
        # The last copy of the slower direction may have run alone; the median ignores it.
        return [median(a.elapsed_time(b) / 1e3 for a, b in pairwise(events)) for events in marks]


def _cpu_copy_s(copies: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    """Return the median seconds of a copy for each (destination, source); all start together, each on a thread."""
    times: list[list[float]] = [[] for _ in copies]
    together = threading.Barrier(len(copies))

    def run(destination: torch.Tensor, source: torch.Tensor, seconds: list[float]) -> None:
        for _ in range(_REPEATS):
            together.wait()
            seconds.append(_timed(lambda: destination.copy_(source)))

    threads = [threading.Thread(target=run, args=(*pair, times[i])) for i, pair in enumerate(copies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [median(seconds) for seconds in times]


def _pinned_alloc_bytes_per_s(device: torch.device, size_bytes: int = 64 * MIB) -> float:
    def allocate() -> float:
        start = time.perf_counter()
        with _pinned(size_bytes, device):
            return time.perf_counter() - start

    return size_bytes / median(allocate() for _ in range(3))


def _matmul_flops_per_s(device: torch.device) -> float:
    n = 8192 if device.type == "cuda" else 1024
    dtype = torch.float32
    if device.type == "cuda":
        # bf16 is emulated below compute capability 8.0.
        dtype = torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    # Random numbers, since a GPU multiplies constants faster. They come from a generator of their own, since the run's
    # random state must not change.
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(n, n, device=device, dtype=dtype, generator=generator) for _ in range(2))
    out = torch.empty(n, n, device=device, dtype=dtype)

    def run() -> None:
        torch.mm(a, b, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    run()
    return 2 * n**3 / median(_timed(run) for _ in range(_REPEATS))


def _timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _memlock_limit_bytes() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _meminfo_bytes(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{path} has no {name}")


def _cgroup_room_bytes(root: Path) -> list[int]:
    """Return the bytes that each limited control group, of this process or above it, can still allocate."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    rooms = []
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Any group above may have the limit. In a container the path is often the host's, and does not exist here: the
        # container's own group is then mounted at `base`.
        group = base / path.lstrip("/")
        groups = [group, *(parent for parent in group.parents if parent.is_relative_to(base))]
        rooms += [room for each in groups if (room := _group_room_bytes(each, *names)) is not None]
    return rooms


def _group_room_bytes(group: Path, limit_name: str, usage_name: str, reclaimable_name: str) -> int | None:
    try:
        limit = (group / limit_name).read_text().strip()
        usage = int((group / usage_name).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    if limit == "max":
        return None
    return int(limit) - usage + int(stat.get(reclaimable_name, 0))
