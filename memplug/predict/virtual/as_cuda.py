"""Makes programs written for CUDA run on the virtual device, by replacing functions of `torch.cuda`.

    with as_cuda():
        import megatron.core  # names CUDA explicitly: `device="cuda"`, `torch.cuda.current_device()`

Tensors that are requested on CUDA are made on the virtual device. They have the `is_cuda` and `type()` of CUDA tensors,
but their `device` is the virtual one. Streams, events and memory numbers are the virtual device's.
`torch.cuda.is_available()` is not replaced, because CUDA's kernels cannot run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memplug.predict.virtual import NAME, VirtualDevice
from memplug.predict.virtual.replacing import replaced
from memplug.torch_private import KNOWN


@contextlib.contextmanager
def as_cuda() -> Iterator[None]:
    """Redirect CUDA to the virtual device inside the context.

    The virtual device must exist. Functions of `torch.cuda` are replaced for all threads. Calls with an argument that
    names CUDA are redirected on this thread only.
    """
    VirtualDevice.current()
    with contextlib.ExitStack() as stack:
        for name, value in _replaced().items():
            stack.enter_context(replaced(torch.cuda, name, value, KNOWN))
        for name in ("get_rng_state", "set_rng_state", "manual_seed"):
            stack.enter_context(replaced(torch.cuda.random, name, getattr(torch.cuda, name), KNOWN))
        for name in ("range_push", "range_pop"):
            stack.enter_context(replaced(torch.cuda.nvtx, name, lambda *args: None, KNOWN))
        stack.enter_context(_OnVirtual())
        yield


class _OnVirtual(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: _there(value) for name, value in (kwargs or {}).items()}
        if func is torch.Tensor.cuda:
            return args[0].to(NAME, non_blocking=kwargs.get("non_blocking", False))
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace(f"torch.{NAME}.", "torch.cuda.")
        if func == torch.Tensor.is_cuda.__get__:  # not `is`: each access makes a new object
            return args[0].device.type == NAME
        return func(*(_there(value) for value in args), **kwargs)


class _Generators:
    """Random generators by device index: always the CPU's, because the virtual device draws no random numbers."""

    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator


class _Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Any:
        return super().__new__(cls, device=NAME, priority=priority)


class _Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
        return super().__new__(cls, device=NAME, enable_timing=enable_timing)


def _replaced() -> dict[str, Any]:
    """Return the replacements for attributes of `torch.cuda`, by name."""
    device = torch.device(NAME, 0)

    def usage() -> Any:
        return VirtualDevice.current().usage()

    def info(of: Any = None) -> tuple[int, int]:
        there = int(VirtualDevice.current().hardware.memory_bytes)
        return there - usage().reserved, there

    return {
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **kwargs: call(),
        "default_generators": _Generators(),
        "current_device": lambda: device,
        "set_device": lambda device: None,
        "device_count": lambda: 1,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "synchronize": lambda device=None: VirtualDevice.current().synchronize(),
        "empty_cache": lambda: VirtualDevice.current().empty_cache(),
        "memory_allocated": lambda device=None: usage().allocated,
        "memory_reserved": lambda device=None: usage().reserved,
        "max_memory_allocated": lambda device=None: usage().allocated_peak,
        "max_memory_reserved": lambda device=None: usage().reserved_peak,
        "reset_peak_memory_stats": lambda device=None: VirtualDevice.current().reset_peaks(),
        "mem_get_info": info,
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": lambda device=None: torch.accelerator.current_stream(),
        "default_stream": lambda device=None: VirtualDevice.default_stream(),
        "stream": lambda stream: contextlib.nullcontext() if stream is None else stream,
        "is_current_stream_capturing": lambda: False,
    }


def _there(value: Any) -> Any:
    """Return the virtual device for a value that names CUDA; return any other value unchanged."""
    if isinstance(value, torch.device):
        return torch.device(NAME) if value.type == "cuda" else value
    return NAME if isinstance(value, str) and value.partition(":")[0] == "cuda" else value
