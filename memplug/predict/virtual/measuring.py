"""Measures the rates of this machine's GPU or CPU, and writes them as a profile for the virtual device."""

from __future__ import annotations

import json
import platform
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from memplug.device.hardware import host_available_bytes, measure_links
from memplug.device.host_time import HostTime
from memplug.errors import HardwareError
from memplug.files import write_whole
from memplug.sizes import MIB
from memplug.torch_private import fused_sdp_choice

_REPEATS = 3
_WORTH_TIMING_S = 1e-3  # a run shorter than this is repeated, and its repeats are timed together
_MOST_AT_ONCE = 100
# Sizes rise until one run takes longer than `_LONGEST_S`, or all runs together longer than `_SERIES_S`. So a slow
# device is measured at small sizes.
_LONGEST_S, _SERIES_S = 0.05, 3.0
_LEAST_S = 1e-9  # a measured duration is at least this: a coarse clock may report 0
_OWN = ("observe_s", "region_s", "restore_s")
_SIDES = tuple(256 << each for each in range(6))  # sides of square matrices
_LENGTHS = tuple(128 << each for each in range(11))
_COPIES_BYTES = {"cuda": (1 * MIB, 16 * MIB, 128 * MIB), "cpu": (1 * MIB, 8 * MIB, 64 * MIB)}
_SMALL_COPY_BYTES = 4096
_HEADS = {"cuda": (16, 128), "cpu": (4, 64)}  # attention's number of heads, and channels of a head
_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}

Doing = Callable[[str], None]
Points = list[list[float]]


def measure_profile(
    device: torch.device | str, host_time: HostTime, doing: Doing = lambda words: None
) -> dict[str, Any]:
    """Measure a hardware profile; each time is the median of several runs.

    The measurements take half a minute at most, or less than a minute on two slow CPU cores.

    * Matrix products multiply square matrices. If the GPU emulates bfloat16, float16's rates stand for bfloat16's.
    * Attention is causal, of one sequence with 16 heads of 128 channels in bfloat16; on the CPU 4 heads of 64 channels
      in float32. Each back end that works here runs forward and backward; torch's own choice is the first in the
      profile.
    * Memory bandwidth is that of an elementwise operator with two inputs.
    * The CPU has no link, so copies within its memory stand for copies over a link.

    The device should be otherwise idle. The global random state does not change. Afterwards this process cannot make a
    virtual device, because a backward has run.

    Args:
        device: "cpu" or a CUDA device with 2 GiB of free memory.
        host_time: The measured host time of memplug's own work.
        doing: Called before each group of measurements, with a few words that name it.

    Returns:
        The contents of a file for `GpuProfile.read`. Each rate is `{"value": ..., "from": "measured"}`. The rates of
        collectives are "assumed": those of the link to the host.

    Raises:
        ValueError: The device is neither a CPU nor a CUDA device.
        OSError: The system is not Linux.
    """
    device = torch.device(device)
    if device.type not in _HEADS:
        raise ValueError(f"can measure cpu and cuda, got {device}")
    is_cuda = device.type == "cuda"
    with torch.cuda.device(device) if is_cuda else nullcontext():
        doing("the link")
        link = _link(device)
        watch = _Watch(device)
        doing("matrix products")
        products = {name: _products(watch, dtype) for name, dtype in _dtypes(device).items()}
        forward, backward = {}, {}
        for name in _backends(device):
            doing(f"attention, {name}")
            forward[name], backward[name] = _attention(watch, _BACKENDS[name])
        doing("memory and launches")
        rates = {
            "memory_bytes": torch.cuda.mem_get_info()[1] if is_cuda else host_available_bytes(),
            "peak_flops": max(rate for _, rate in products["bfloat16"]),
            "matmul_flops": products,
            "attention_forward_flops": forward,
            "attention_backward_flops": backward,
            "memory_bytes_per_s": _memory_bytes_per_s(watch),
            "kernel_s": _kernel_s(watch),
            **link,
            "launch_s": _launch_s(device),
            **{name: max(getattr(host_time, name), _LEAST_S) for name in _OWN},
        }
    profile = {each: _marked(value) for each, value in rates.items()}
    # One GPU cannot measure collectives. The profile assumes that they go over the link to the host.
    (_, rate), least_s = link["to_host_both_bytes_per_s"][-1], link["copy_s"]
    for each, value in (("collective_bytes_per_s", rate), ("collective_s", least_s)):
        profile[each] = {"value": _rounded(value), "from": "assumed"}
    name = torch.cuda.get_device_name(device) if is_cuda else platform.processor() or platform.machine()
    return {"name": name, **profile}


def write_profile(file: Path, profile: Mapping[str, Any]) -> None:
    """Write a profile to a file, with one line for each rate.

    Args:
        file: The file.
        profile: The profile, from `measure_profile`.

    Raises:
        HardwareError: The file cannot be written.
    """
    lines = []
    for name, entry in profile.items():
        if isinstance(entry, Mapping) and "from" not in entry:
            inner = ",\n".join(f"    {json.dumps(each)}: {json.dumps(entry[each])}" for each in entry)
            lines.append(f"  {json.dumps(name)}: {{\n{inner}\n  }}")
        else:
            lines.append(f"  {json.dumps(name)}: {json.dumps(entry)}")
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    write_whole(file, "hardware profile", lambda out: out.write(text.encode()), HardwareError)


class _Watch:
    """A stopwatch for work on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._numbers = torch.Generator(device).manual_seed(0)
        # A buffer. Zeroing it keeps a GPU busy while the host queues the timed runs, so that the time to queue them is
        # not measured.
        self._before = torch.empty(128 * MIB, dtype=torch.uint8, device=device) if device.type == "cuda" else None

    def random(self, *sizes: int, dtype: torch.dtype) -> torch.Tensor:
        """Return normally distributed numbers, not constants, which a GPU multiplies faster."""
        return torch.randn(*sizes, dtype=dtype, device=self.device, generator=self._numbers)

    def seconds(self, run: Callable[[], object]) -> float:
        """Run a function once untimed, then several times, and return the median duration of a run, in seconds."""
        run()
        once_s = max(self._together_s(run, 1), _LEAST_S)
        count = max(1, min(_MOST_AT_ONCE, int(_WORTH_TIMING_S / once_s)))
        return max(median(self._together_s(run, count) for _ in range(_REPEATS)) / count, _LEAST_S)

    def _together_s(self, run: Callable[[], object], count: int) -> float:
        if self._before is None:
            began_s = time.perf_counter()
            for _ in range(count):
                run()
            return time.perf_counter() - began_s
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(20):
            self._before.zero_()
        begin.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def _until_slow(sizes: Iterable[int], measure: Callable[[int], float]) -> Iterator[tuple[int, float]]:
    """Yield pairs of size and measured seconds until the runs take too long, or device memory runs out."""
    began_s = time.perf_counter()
    for turn, size in enumerate(sizes):
        try:
            seconds = measure(size)
        except torch.OutOfMemoryError:
            if turn == 0:
                raise
            return
        yield size, seconds
        if seconds > _LONGEST_S or time.perf_counter() - began_s > _SERIES_S:
            return


def _dtypes(device: torch.device) -> dict[str, torch.dtype]:
    # GPUs below compute capability 8.0 emulate bfloat16.
    emulated = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    half = torch.float16 if emulated else torch.bfloat16
    return {"bfloat16": half, "float32": torch.float32, "float64": torch.float64}


def _products(watch: _Watch, dtype: torch.dtype) -> Points:
    """Measure the rates of matrix products in one dtype.

    Returns:
        Pairs of a product's floating-point operations and its operations per second.
    """

    def measure(side: int) -> float:
        left, right = (watch.random(side, side, dtype=dtype) for _ in range(2))
        out = torch.empty_like(left)
        return watch.seconds(lambda: torch.mm(left, right, out=out))

    return [[2.0 * side**3, 2.0 * side**3 / seconds] for side, seconds in _until_slow(_SIDES, measure)]


def _backends(device: torch.device) -> list[str]:
    """Return the attention back ends that run here, torch's own choice first.

    The list has "math", which has no fused kernel, only if no other back end runs.
    """
    query, *others = _attention_inputs(_Watch(device), _LENGTHS[0])
    found = []
    for name, backend in _BACKENDS.items():
        with sdpa_kernel(backend), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns why a back end does not run
            try:
                scaled_dot_product_attention(query, *others, is_causal=True).sum().backward()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:
                continue
        found.append(name)
    chosen = fused_sdp_choice(query, *others, is_causal=True)
    found = [name for name in found if name != "math"] or found
    return sorted(found, key=lambda name: int(_BACKENDS[name]) != chosen)


def _attention_inputs(watch: _Watch, tokens: int) -> list[torch.Tensor]:
    heads, channels = _HEADS[watch.device.type]
    dtype = torch.float32 if watch.device.type == "cpu" else _dtypes(watch.device)["bfloat16"]
    return [watch.random(1, heads, tokens, channels, dtype=dtype).requires_grad_() for _ in range(3)]


def _attention(watch: _Watch, backend: SDPBackend) -> tuple[Points, Points]:
    """Measure the rates of attention's forward and backward.

    Forward counts 2 floating-point operations for each pair of tokens and each channel, backward 5 (`GpuProfile`).

    Returns:
        One list for forward and one for backward. Each entry is a pair: tokens in a sequence, and operations per
        second.
    """
    backward_s: dict[int, float] = {}

    def measure(tokens: int) -> float:
        inputs = _attention_inputs(watch, tokens)
        with torch.no_grad():
            forward_s = watch.seconds(lambda: scaled_dot_product_attention(*inputs, is_causal=True))
        out = scaled_dot_product_attention(*inputs, is_causal=True)
        gradient = torch.ones_like(out)
        seconds = watch.seconds(lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True))
        backward_s[tokens] = seconds
        return forward_s

    heads, channels = _HEADS[watch.device.type]
    with sdpa_kernel(backend):
        forward_s = dict(_until_slow(_LENGTHS, measure))
    rates = []
    for operations, seconds in ((2.0, forward_s), (5.0, backward_s)):
        pairs = {tokens: heads * channels * tokens**2 for tokens in forward_s}
        rates.append([[tokens, operations * pairs[tokens] / seconds[tokens]] for tokens in forward_s])
    return rates[0], rates[1]


def _memory_bytes_per_s(watch: _Watch) -> float:
    # Sizes exceed the caches.
    size = (256 if watch.device.type == "cuda" else 64) * MIB
    left, right, out = (torch.ones(size // 4, device=watch.device) for _ in range(3))
    return 3 * size / watch.seconds(lambda: torch.add(left, right, out=out))


def _kernel_s(watch: _Watch) -> float:
    one = torch.ones(1, device=watch.device)
    return watch.seconds(lambda: one.add_(1))


def _launch_s(device: torch.device) -> float:
    """Return the host time of one operator that allocates its output, in seconds.

    On the CPU, which queues nothing, this is the whole time of a small operator.
    """
    one = torch.ones(1, device=device)

    def queue() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began_s = time.perf_counter()
        for _ in range(_MOST_AT_ONCE):
            torch.add(one, one)
        return (time.perf_counter() - began_s) / _MOST_AT_ONCE

    return max(median(queue() for _ in range(_REPEATS + 1)), _LEAST_S)


def _link(device: torch.device) -> dict[str, Any]:
    """Measure the rates of copies in each direction, by the bytes of a copy, and the fixed time of a copy.

    The fixed time is that of a copy of `_SMALL_COPY_BYTES`; it is subtracted before rates are computed.

    Returns:
        The profile's entries by name.
    """
    small_s = [_SMALL_COPY_BYTES / rate for rate in measure_links(device, _SMALL_COPY_BYTES, together=False)]
    copy_s = fmean(small_s)
    found: dict[str, Any] = {}
    for both, together in (("", False), ("_both", True)):
        for size in _COPIES_BYTES[device.type]:
            for to, rate in zip(("host", "device"), measure_links(device, size, together=together), strict=True):
                seconds = size / rate
                points = found.setdefault(f"to_{to}{both}_bytes_per_s", [])
                points.append([size, size / max(seconds - copy_s, seconds / 2)])
    return {**found, "copy_s": copy_s}


def _marked(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {name: _marked(each) for name, each in value.items()}
    if isinstance(value, list):
        return {"value": [[size, _rounded(rate)] for size, rate in value], "from": "measured"}
    return {"value": _rounded(value), "from": "measured"}


def _rounded(value: float) -> float:
    """Round to four digits; repeated measurements agree in fewer."""
    return float(f"{value:.4g}")
