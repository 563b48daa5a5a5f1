"""Runs Transformer Engine's modules as units of a region; in FP8 they run again with the scales of their forward.

The modules call kernels that torch's dispatcher does not see. memplug can run each module again by itself, and sees the
tensors that it saves for backward (memplug.tokenwise.engine.units):

| class | operations | runs again |
|---|---|---|
| `Linear`, `LayerNormLinear` | a matmul; in `LayerNormLinear` after a norm of each token's features | by rows |
| `LayerNormMLP` | a norm of each token's features, two matmuls, an elementwise activation | by rows |
| `LayerNorm`, `RMSNorm` | a norm of each token's features | by rows |
| `GroupedLinear` | a matmul for each expert; a list has each expert's number of tokens | whole |
| `DotProductAttention` | attention | whole |
| any other without modules of these classes | any | whole |

A module runs by rows only if no other rank takes part and nothing is quantized: a scale covers a tensor or a part of
it, and a transposed copy has no rows. Other ranks take part if the module's tensor-parallel or context-parallel group
has more than one rank. Then either all ranks of the group run the unit again, or none does
(memplug/tokenwise/agreement.py).

| patched | on | why |
|---|---|---|
| `checkpoint` | `transformer_engine.pytorch`, its `distributed` | to refuse it: memplug takes its place |
| `get_cpu_offload_context` | `transformer_engine.pytorch`, its `cpu_offload` | to refuse it: memplug takes its place |

Delayed scaling: in a forward under `activation_recompute_forward`, each module appends a copy of its scales and amax
histories to a queue; in the recompute phase, it runs with the first copy in the queue. memplug removes the copy when
the unit's forward ends, and puts it at the front of the queue before the unit runs again. So micro-batches may run
again in any order, and a unit need not run again. memplug restores the forward's autocast state without entering an
autocast, since leaving one would update the scales once more.

According to their sources, transformer-engine 1.13 to 2.20 have these symbols. 2.20.2 ran on an H200 in bfloat16 and in
FP8 with delayed, current and block scaling, with flash-attn and with Transformer Engine's own unfused attention.
cuDNN's attention could not be loaded there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from memplug.errors import ConflictError, PatchError
from memplug.hooks.patching import patch
from memplug.hooks.units import make_unit
from memplug.session.attached import AttachedModel
from memplug.tokenwise.engine.executor import Executor
from memplug.tokenwise.engine.operators import CaptureKind
from memplug.tokenwise.engine.units import Unit

VERSIONS = "transformer-engine 1.13 to 2.20"

_ROW_WISE = {"Linear", "LayerNormLinear", "LayerNormMLP", "LayerNorm", "RMSNorm"}
_KINDS = {
    **dict.fromkeys(("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear"), CaptureKind.ROWS),
    **dict.fromkeys(("LayerNorm", "RMSNorm"), None),
    "DotProductAttention": CaptureKind.ATTENTION,
}
_QUEUE = "global_fp8_buffer_pos_fwd_recompute"
_NOTHING = contextlib.nullcontext()


def is_loaded() -> bool:
    """Return whether the program has imported Transformer Engine."""
    return "transformer_engine.pytorch" in sys.modules


def is_of_transformer_engine(module: nn.Module) -> bool:
    """Return whether a module is Transformer Engine's, or a framework's class derived from one."""
    return any(kind.__module__.partition(".")[0] == "transformer_engine" for kind in type(module).__mro__)


def parts_of(region: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Return the modules of Transformer Engine inside a region that become units, in the region's order.

    Returns:
        (name, module, class) for each. The class is the known one of Transformer Engine that the module's class
        derives from, or "".
    """
    found: list[tuple[str, nn.Module, str]] = []

    def visit(name: str, module: nn.Module) -> None:
        own = _class_of(module)
        if own:
            found.append((name, module, own))
            return
        before = len(found)
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child)
        if name and len(found) == before and is_of_transformer_engine(module):
            found.append((name, module, ""))

    visit("", region)
    return found


def hook(regions: Sequence[nn.Module], attached: AttachedModel) -> None:
    """Run the modules of Transformer Engine in the session's regions as units, until the session detaches.

    Args:
        regions: the modules of the session's regions, in the regions' order.
        attached: the session.

    Raises:
        PatchError: this version lacks a feature that memplug needs.
        ConflictError: a module's forward was replaced.
    """
    if not is_loaded():
        return
    for region, module in zip(attached.regions, regions, strict=True):
        for name, part, own in parts_of(module):
            partners = _partners(part, own)
            make_unit(part, _unit(attached.executor, name, part, own, is_shared=partners != frozenset()), attached)
            if partners is None or region.partners is None:
                region.partners = None
            else:
                region.partners |= partners
        region.native.shares = region.partners != frozenset()
    _refuse(attached)


def _class_of(module: nn.Module) -> str:
    known = (
        kind.__name__
        for kind in type(module).__mro__
        if kind.__module__.partition(".")[0] == "transformer_engine" and kind.__name__ in _KINDS
    )
    return next(known, "")


def _unit(executor: Executor, name: str, module: nn.Module, own: str, is_shared: bool) -> Unit:
    passes = _Passes(module, is_known=bool(own))
    return Unit(
        executor,
        name,
        _KINDS.get(own),
        is_row_wise=lambda state: own in _ROW_WISE and not state.is_quantized,
        is_shared=is_shared,
        puts_back=own in ("", "DotProductAttention"),  # dropout in these may use a generator state of its own
        lasting=passes.kept_casts,
        reads=module.parameters,
        forward=passes.forward,
        again=passes.again,
    )


def _partners(module: nn.Module, own: str) -> frozenset[int] | None:
    """Return the ranks that a unit's forward may communicate with; None if they are not known.

    These are the ranks of the unit's tensor-parallel group; for attention, the ranks of its context-parallel group.
    """
    found: set[int] = set()
    for part in module.modules():
        context = getattr(part, "cp_group", None)
        groups = list(context) if isinstance(context, (list, tuple)) else [context]
        if own != "DotProductAttention" and getattr(part, "tp_size", 1) > 1:
            if getattr(part, "tp_group", None) is None:
                return None
            groups.append(part.tp_group)
        for group in groups:
            ranks = dist.get_process_group_ranks(group) if group is not None else []
            found.update(ranks if len(ranks) > 1 else ())
    return frozenset(found)


@dataclass
class _UnitState:
    """The state that a unit's forward ran with.

    Attributes:
        is_quantized: True if the forward may have used scales; otherwise only `autocast` is restored.
        autocast: autocast's state, as Transformer Engine returns and accepts it.
        is_first: for each of the unit's modules, whether it was the first module of the autocast.
        scales: copies of scales and amax histories, each with the number of its queue.
    """

    is_quantized: bool
    autocast: Any
    is_first: list[bool] = field(default_factory=list)
    scales: list[tuple[int, Any]] = field(default_factory=list)


class _Passes:
    """Makes the contexts for the forward of one unit, and for running it again.

    Args:
        module: the unit's module.
        is_known: True if the module's class is a known one. Modules of known classes enter an autocast of their own
            only if their `will_execute_quantized` returns True (Megatron-Core's classes have it).
    """

    def __init__(self, module: nn.Module, is_known: bool):
        self._modules = [part for part in module.modules() if hasattr(part, "fp8_meta")]
        self._is_known = is_known
        asked = (getattr(part, "will_execute_quantized", None) for part in self._modules)
        self._asked = [ask for ask in asked if ask is not None]

    def forward(self) -> AbstractContextManager[_UnitState]:
        """Return a context for a forward; it yields the unit's state, which is complete when the context exits."""
        state = _UnitState(self.is_quantized(), _autocast()[0]())
        return self._noting(state) if state.is_quantized else contextlib.nullcontext(state)

    def again(self, state: _UnitState | None) -> AbstractContextManager[None]:
        """Return a context in which the unit, run again, has the state of its forward."""
        if state is None or not (state.is_quantized or _manager().is_fp8_enabled()):
            return _NOTHING
        return self._with(state)

    @contextlib.contextmanager
    def _noting(self, state: _UnitState) -> Iterator[_UnitState]:
        recompute = _distributed().activation_recompute_forward
        lengths = {number: len(queue) for number, queue in self._queues()}
        firsts = len(recompute._is_first_fp8_module)
        with recompute(activation_recompute=True, recompute_phase=False):
            try:
                yield state
            finally:
                for number, queue in self._queues():
                    taken = [queue.pop() for _ in range(len(queue) - lengths.get(number, 0))]
                    state.scales += [(number, scales) for scales in reversed(taken)]
                while len(recompute._is_first_fp8_module) > firsts:
                    state.is_first.append(recompute._is_first_fp8_module.pop())

    @contextlib.contextmanager
    def _with(self, state: _UnitState) -> Iterator[None]:
        recompute, (get, put) = _distributed().activation_recompute_forward, _autocast()
        queues, firsts = dict(self._queues()), recompute._is_first_fp8_module
        lengths = {number: len(queue) for number, queue in queues.items()}
        before = len(firsts)
        for number, scales in reversed(state.scales):
            queues[number].appendleft(scales)
        for is_first in state.is_first:
            firsts.insert(0, is_first)
        now = get()
        put(state.autocast)
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(_inside_autocast())
                if state.is_quantized:
                    stack.enter_context(recompute(activation_recompute=True, recompute_phase=True))
                yield
        finally:
            put(now)
            del firsts[: len(firsts) - before]  # after an error, entries that no module has removed
            for number, length in lengths.items():
                for _ in range(len(queues[number]) - length):
                    queues[number].popleft()

    def is_quantized(self) -> bool:
        """Return whether a forward that begins now may quantize tensors or collect amaxes."""
        manager = _manager()
        if not self._is_known or manager.is_fp8_enabled() or manager.is_fp8_calibration():
            return True
        return bool(self._asked) and any(ask(False) for ask in self._asked)

    def kept_casts(self) -> list[torch.Tensor]:
        """Return the weight casts that modules cache for all micro-batches of a step, and the tensors in the casts."""
        found = []
        for part in self._modules:
            for cast in getattr(part, "_fp8_workspaces", {}).values():
                found += [value for value in (cast, *vars(cast).values()) if isinstance(value, torch.Tensor)]
        return found

    def _queues(self) -> list[tuple[int, Any]]:
        """Return (number, queue) for each module of the unit that already has a queue of copied scales."""
        manager = _manager()
        queues = getattr(manager, "quantization_state", manager).fp8_tensors_recompute_buffer
        numbers = [part.fp8_meta[_QUEUE] for part in self._modules if _QUEUE in part.fp8_meta]
        return [(number, queues[number]) for number in numbers]


@contextlib.contextmanager
def _inside_autocast() -> Iterator[None]:
    """Make each autocast in this context a nested one: only the outermost autocast updates the scales when it ends."""
    manager = _manager()
    owner = getattr(manager, "quantization_state", manager)
    name = next(name for name in ("autocast_depth", "AUTOCAST_DEPTH", "FP8_AUTOCAST_DEPTH") if hasattr(owner, name))
    setattr(owner, name, getattr(owner, name) + 1)
    try:
        yield
    finally:
        setattr(owner, name, getattr(owner, name) - 1)


@functools.cache
def _autocast() -> tuple[Any, Any]:
    """Return the functions that get and set the state of autocast."""
    manager = _manager()
    for prefix in ("", "fp8_"):  # "fp8_" before 2.9
        get = getattr(manager, f"get_{prefix}autocast_state", None)
        put = getattr(manager, f"set_{prefix}autocast_state", None)
        if get is not None and put is not None:
            return get, put
    raise PatchError("FP8GlobalStateManager.get_autocast_state", VERSIONS)


@functools.cache
def _manager() -> Any:
    for name in ("quantization", "fp8"):  # "fp8" before 2.9
        with contextlib.suppress(ImportError, AttributeError):
            return importlib.import_module(f"transformer_engine.pytorch.{name}").FP8GlobalStateManager
    raise PatchError("transformer_engine.pytorch.quantization.FP8GlobalStateManager", VERSIONS)


@functools.cache
def _distributed() -> Any:
    module = importlib.import_module("transformer_engine.pytorch.distributed")
    if not hasattr(module, "activation_recompute_forward"):
        raise PatchError("transformer_engine.pytorch.distributed.activation_recompute_forward", VERSIONS)
    return module


def _refuse(attached: AttachedModel) -> None:
    def checkpoint(original: Any, *args: Any, **kwargs: Any) -> Any:
        raise ConflictError(
            "transformer_engine.pytorch.checkpoint is called while memplug recomputes the same layers",
            "Call the function itself: memplug takes the place of `checkpoint`. Or detach memplug.",
            code="MP002",
        )

    def offload(original: Any, *args: Any, **kwargs: Any) -> Any:
        if not (args[0] if args else kwargs.get("enabled", False)):
            return original(*args, **kwargs)
        raise ConflictError(
            "transformer_engine.pytorch.get_cpu_offload_context is called while memplug offloads the same layers",
            "Leave it out: memplug takes its place. Or detach memplug.",
            code="MP002",
        )

    package = importlib.import_module("transformer_engine.pytorch")
    places = (("checkpoint", "distributed", checkpoint), ("get_cpu_offload_context", "cpu_offload", offload))
    for name, module, wrapper in places:
        for owner in (package, sys.modules.get(f"transformer_engine.pytorch.{module}")):
            if hasattr(owner, name):
                patch(owner, name, wrapper, attached, VERSIONS)
