"""Runs small models of Megatron-Core on a machine without a GPU: the CPU stands in for CUDA.

Megatron-Core hard-codes the device (`device="cuda"`, `torch.cuda.current_device()`), orders work by streams, and draws
from CUDA's generator. Here tensors land on the CPU, streams order nothing, and the generator is the CPU's.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class _OnCpu(TorchFunctionMode):
    """Makes tensors for CUDA on the CPU; `Tensor.type()` calls them CUDA tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if func is torch.Tensor.to:
            args = tuple(CPU if _is_cuda(value) else value for value in args)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)  # there is no driver to register memory with
        return func(*args, **kwargs)


class _Stream:
    """A stream or event that orders nothing: the CPU runs everything in the order of the program."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self


@functools.cache
def pretend() -> None:
    """Replace CUDA by the CPU for the rest of the process.

    Call it before any module of Megatron-Core is imported or built.
    """
    cuda = torch.cuda
    replaced = {
        "current_device": lambda: CPU,
        "set_device": lambda device: None,
        "device_count": lambda: 1,
        "is_available": lambda: False,  # torch would derive True from `device_count`
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": _Stream,
        "default_stream": _Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: False,
    }
    for name, value in replaced.items():
        mock.patch.object(cuda, name, value).start()
    for name in ("range_push", "range_pop"):
        mock.patch.object(cuda.nvtx, name, lambda *args: None).start()
    torch.compiler.set_stance("force_eager")  # compiling takes longer than training a small model
    _OnCpu().__enter__()
    _patch_megatron()


def _patch_megatron() -> None:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    token_dispatcher.maybe_move_tensor_to_cpu = _to_cpu
    # Megatron-Core warns that the CPU's generator changed instead of CUDA's, which is intended here
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, torch.device) and device.type == "cuda") or (
        isinstance(device, str) and device.partition(":")[0] == "cuda"
    )
