"""Recompute contexts, TE's own checkpoint, and collectives along a tensor's first dimension."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator
from typing import Any

import torch

from transformer_engine.pytorch._quantization_state import qstate
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, autocast

_MODEL_PARALLEL_ATTRIBUTE_DEFAULTS = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1}
_FP8_ACTIVATION_RECOMPUTE_ENABLED = False
_FP8_ACTIVATION_RECOMPUTE_PHASE = False


class activation_recompute_forward(AbstractContextManager, ContextDecorator):
    """A context around a forward that will run again (`recompute_phase` False), and around its second run (True)."""

    _is_first_fp8_module: list[bool] = []

    def __init__(self, activation_recompute: bool = False, recompute_phase: bool = False):
        self.activation_recompute = activation_recompute
        self.recompute_phase = recompute_phase

    def __enter__(self) -> None:
        global _FP8_ACTIVATION_RECOMPUTE_ENABLED, _FP8_ACTIVATION_RECOMPUTE_PHASE
        _FP8_ACTIVATION_RECOMPUTE_ENABLED = self.activation_recompute and FP8GlobalStateManager.is_fp8_enabled()
        _FP8_ACTIVATION_RECOMPUTE_PHASE = self.recompute_phase
        firsts = activation_recompute_forward._is_first_fp8_module
        if self.activation_recompute and not self.recompute_phase:
            firsts.append(qstate().is_first_fp8_module)
        if self.activation_recompute and self.recompute_phase:
            qstate().is_first_fp8_module = firsts.pop(0)

    def __exit__(self, *exc_details: Any) -> None:
        global _FP8_ACTIVATION_RECOMPUTE_ENABLED, _FP8_ACTIVATION_RECOMPUTE_PHASE
        _FP8_ACTIVATION_RECOMPUTE_ENABLED = False
        _FP8_ACTIVATION_RECOMPUTE_PHASE = False


def is_fp8_activation_recompute_enabled() -> bool:
    """Return whether the caller is inside `activation_recompute_forward(True, ...)`, and in FP8."""
    return _FP8_ACTIVATION_RECOMPUTE_ENABLED


def in_fp8_activation_recompute_phase() -> bool:
    """Return whether the caller is inside `activation_recompute_forward(..., True)`."""
    return _FP8_ACTIVATION_RECOMPUTE_PHASE


def _random_state() -> list[torch.Tensor]:
    cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *cuda]


def _set_random_state(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


class _CheckpointFunction(torch.autograd.Function):
    """Saves its inputs only; the forward runs again in backward, in the recompute phase."""

    @staticmethod
    def forward(ctx: Any, run_function: Callable, get_tracker: Any, kwargs: dict[str, Any], *args: Any) -> Any:
        ctx.run_function, ctx.get_tracker, ctx.kwargs = run_function, get_tracker, kwargs
        ctx.states = _random_state(), get_tracker().get_states() if get_tracker else None
        with torch.no_grad(), activation_recompute_forward(activation_recompute=True, recompute_phase=False):
            outputs = run_function(*args, **kwargs)
        ctx.others = [None if torch.is_tensor(arg) else arg for arg in args]
        ctx.save_for_backward(*(arg if torch.is_tensor(arg) else None for arg in args))
        ctx.fp8 = FP8GlobalStateManager.is_fp8_enabled()
        ctx.fp8_recipe = FP8GlobalStateManager.get_fp8_recipe() if ctx.fp8 else None
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("Checkpointing is not compatible with .grad(), please use .backward() if possible")
        inputs = [
            other if saved is None else saved.detach().requires_grad_(saved.requires_grad)
            for saved, other in zip(ctx.saved_tensors, ctx.others, strict=True)
        ]
        states = _random_state(), ctx.get_tracker().get_states() if ctx.get_tracker else None
        _set_states(ctx.get_tracker, *ctx.states)
        with (
            torch.enable_grad(),
            activation_recompute_forward(activation_recompute=True, recompute_phase=True),
            autocast(enabled=ctx.fp8, recipe=ctx.fp8_recipe),
        ):
            outputs = ctx.run_function(*inputs, **ctx.kwargs)
        _set_states(ctx.get_tracker, *states)
        outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if torch.is_tensor(output)]
        pairs = [(output, grad) for output, grad in pairs if output.requires_grad]
        torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
        return (None, None, None, *(x.grad if isinstance(x, torch.Tensor) else None for x in inputs))


def _set_states(get_tracker: Any, random: list[torch.Tensor], tracked: Any) -> None:
    _set_random_state(random)
    if get_tracker:
        get_tracker().set_states(tracked)


def checkpoint(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Run a function under Transformer Engine's own activation checkpointing, reentrant."""
    if not kwargs.pop("use_reentrant", True) or kwargs.pop("distribute_saved_activations", False):
        raise NotImplementedError("the stand-in's checkpoint is reentrant, and does not distribute what it saves")
    kwargs.pop("tp_group", None)
    get_tracker = kwargs.pop("get_rng_state_tracker", None)
    return _CheckpointFunction.apply(function, get_tracker, kwargs, *args)


class CudaRNGStatesTracker:
    """Named random states of the device, for ranks that share some of them and not others."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Remove all states."""
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return a copy of the dictionary of states."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replace all states."""
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Add a new state."""
        if seed in self.seeds_ or name in self.states_:
            raise RuntimeError(f"cuda rng state {name} or its seed {seed} exists already")
        self.seeds_.add(seed)
        before = torch.cuda.get_rng_state()
        torch.cuda.manual_seed(seed)
        self.states_[name] = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw random numbers from the named state inside the `with`."""
        if name not in self.states_:
            raise KeyError(f"cuda rng state {name} is not added")
        before = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.cuda.get_rng_state()
            torch.cuda.set_rng_state(before)


def set_tensor_model_parallel_attributes(tensor: torch.Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Mark how a weight is split over ranks."""
    for attribute in _MODEL_PARALLEL_ATTRIBUTE_DEFAULTS:
        assert not hasattr(tensor, attribute)
    tensor.tensor_model_parallel, tensor.partition_dim, tensor.partition_stride = is_parallel, dim, stride


def get_distributed_world_size(group: Any = None) -> int:
    """Return the number of ranks, 1 if torch.distributed is not initialized."""
    return torch.distributed.get_world_size(group=group) if torch.distributed.is_initialized() else 1


def get_distributed_rank(group: Any = None) -> int:
    """Return this process's rank in a group."""
    return torch.distributed.get_rank(group=group)


def gather_along_first_dim(inp: Any, process_group: Any, async_op: bool = False, quantizer: Any = None) -> Any:
    """Return all ranks' rows, and the collective's work; if there is a quantizer, quantize the gathered rows.

    The real function gathers quantized elements, which moves fewer bytes and gives the same values.
    """
    world_size = get_distributed_world_size(process_group)
    if quantizer is not None:
        local = inp.dequantize() if hasattr(inp, "dequantize") and hasattr(inp, "operand") else inp
        gathered, work = gather_along_first_dim(local, process_group)
        return quantizer(gathered), work
    if world_size == 1:
        return inp, None
    output = torch.empty((inp.shape[0] * world_size, *inp.shape[1:]), dtype=inp.dtype, device=inp.device)
    work = torch.distributed.all_gather_into_tensor(output, inp.contiguous(), group=process_group, async_op=async_op)
    return output, work


def reduce_scatter_along_first_dim(inp: torch.Tensor, tp_group: Any, async_op: bool = False) -> Any:
    """Return this rank's rows of the sum, and the collective's work."""
    world_size = get_distributed_world_size(tp_group)
    if world_size == 1:
        return inp, None
    output = torch.empty((inp.shape[0] // world_size, *inp.shape[1:]), dtype=inp.dtype, device=inp.device)
    work = torch.distributed.reduce_scatter_tensor(output, inp.contiguous(), group=tp_group, async_op=async_op)
    return output, work


def allreduce(inp: torch.Tensor, tp_group: Any = None, async_op: bool = False) -> Any:
    """Return the sum, in the same memory, and the collective's work."""
    if get_distributed_world_size(tp_group) == 1:
        return inp, None
    return inp, torch.distributed.all_reduce(inp, group=tp_group, async_op=async_op)
