"""All private or unstable names of torch that memplug's Python uses; those of the C++ are in `native/torch_private.h`.

Each name is looked up once, when this module is imported, except the names of torch's compiler. If the installed torch
lacks a name, `check` and `check_compiler` raise at attach, and calling the name raises the same error. Private
attributes of objects, such as `Tensor._version`, are not listed here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import CodeType, FrameType
from typing import Any

import torch

from memplug.errors import UnsupportedVersionError

OLDEST, NEWEST = "2.6", "2.15"
KNOWN = f"torch {OLDEST} to {NEWEST}"
"""Versions of torch that memplug knows."""

COMPILED_CALL = "_compiled_call_impl"
"""Attribute that `torch.nn.Module.compile` sets, and to which a call of the module goes."""

_lacking: list[tuple[str, str]] = []


def _looked_up(path: str) -> Any:
    """Return the object of torch with a dotted name; raise AttributeError if there is none."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        return functools.reduce(getattr, parts[length:], found)
    raise AttributeError(path)


def _lacks(path: str, use: str) -> UnsupportedVersionError:
    return UnsupportedVersionError(
        f"torch {torch.__version__} has no {path}, with which memplug {use}; {KNOWN} have it",
        f"Install {KNOWN}, or a newer memplug.",
    )


def _name(path: str, use: str, *older: str, needed: bool = True) -> Any:
    """Return the object of torch with a name, or a function that raises UnsupportedVersionError if there is none.

    Args:
        path: Dotted name.
        use: What memplug does with the object, as a verb phrase: "recomputes outside of function transforms".
        older: Names of the object in older versions of torch.
        needed: Whether `check` raises if the object is absent.
    """
    for each in (path, *older):
        with contextlib.suppress(AttributeError):
            return _looked_up(each)
    if needed:
        _lacking.append((path, use))

    def lacking(*args: Any, **kwargs: Any) -> Any:
        raise _lacks(path, use)

    return lacking


def check() -> None:
    """Check that torch has all names that training needs.

    Raises:
        UnsupportedVersionError: torch is older than the oldest known version, or lacks a name.
    """
    if _version(torch.__version__) < _version(OLDEST):
        raise UnsupportedVersionError(f"memplug needs torch {OLDEST} or newer; {torch.__version__} is installed")
    if _lacking:
        raise _lacks(*_lacking[0])


def is_newer_than_known() -> bool:
    """Return whether the installed torch is newer than the versions that memplug knows."""
    return _version(torch.__version__) > _version(NEWEST)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2])


# -- autograd, and the modes and transforms around it --

_TRACED, _TRANSFORMED = "detects programs that torch traces", "detects function transforms"

current_graph_task_id = _name("torch._C._current_graph_task_id", "tells recomputed forwards from training's own")
saved_tensors_hooks_is_enabled = _name("torch._C._autograd._saved_tensors_hooks_is_enabled", "asks whether it may save")
_name("torch._C._autograd._push_saved_tensors_default_hooks", "saves tensors, in C++")
_name("torch._C._autograd._pop_saved_tensors_default_hooks", "saves tensors, in C++")
unsafe_preserve_version_counter = _name("torch.autograd._unsafe_preserve_version_counter", "restores buffers")

peek_interpreter_stack = _name("torch._C._functorch.peek_interpreter_stack", _TRANSFORMED)
is_functorch_wrapped_tensor = _name("torch._C._functorch.is_functorch_wrapped_tensor", _TRANSFORMED)
vmapmode_increment_nesting = _name("torch._C._vmapmode_increment_nesting", _TRANSFORMED)
vmapmode_decrement_nesting = _name("torch._C._vmapmode_decrement_nesting", _TRANSFORMED)
temporarily_clear_interpreter_stack = _name(
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack", "recomputes outside of function transforms"
)
_name("torch.autograd.forward_ad._current_level", "detects forward-mode differentiation")

is_jit_tracing = _name("torch._C._is_tracing", _TRACED)
get_dispatch_mode = _name("torch._C._get_dispatch_mode", _TRACED)
len_torch_dispatch_stack = _name("torch._C._len_torch_dispatch_stack", _TRACED)
_fx_tracing = _name(
    "torch.fx._symbolic_trace._get_is_fx_tracing", _TRACED, "torch.fx._symbolic_trace._is_fx_tracing_flag"
)
TRACING = tuple(_name(f"torch._C._TorchDispatchModeKey.{mode}", _TRACED) for mode in ("PROXY", "FUNCTIONAL", "FAKE"))
"""Modes of make_fx, torch.export and fake tensors."""

get_function_modes = _name("torch.overrides._get_current_function_mode_stack", "finds the default device of a forward")
push_function_mode = _name("torch.overrides._push_mode", "compiles FlexAttention outside of modes")
pop_function_mode = _name("torch.overrides._pop_mode", "compiles FlexAttention outside of modes")
DeviceContext = _name("torch.utils._device.DeviceContext", "finds the default device of a forward")

get_eval_frame_callback = _name("torch._C._dynamo.eval_frame.get_eval_frame_callback", "sees whether Dynamo is at work")
tree_flatten = _name("torch.utils._pytree.tree_flatten", "takes arguments of regions apart, in C++")
tree_unflatten = _name("torch.utils._pytree.tree_unflatten", "puts arguments of regions together, in C++")
tree_leaves = _name("torch.utils._pytree.tree_leaves", "makes estimates", needed=False)
tree_map = _name("torch.utils._pytree.tree_map", "makes estimates", needed=False)
OpOverload = _name("torch._ops.OpOverload", "knows operators")
get_default_store = _name("torch.distributed.distributed_c10d._get_default_store", "has ranks agree", needed=False)
empty_host_cache = _name("torch._C._host_emptyCache", "releases pinned memory", needed=False)
dump_snapshot = _name("torch.cuda.memory._dump_snapshot", "writes a snapshot when memory runs out", needed=False)


def is_fx_tracing() -> bool:
    """Return whether torch.fx is tracing a program."""
    # Up to torch 2.13 the name is a flag, not a function.
    return bool(_fx_tracing() if callable(_fx_tracing) else torch.fx._symbolic_trace._is_fx_tracing_flag)


def is_in_forward_ad() -> bool:
    """Return whether forward-mode differentiation is on."""
    return bool(torch.autograd.forward_ad._current_level >= 0)


# -- torch's compiler: looked up on use, because it takes as long to import as all the rest --

COMPILER, FLEX_ATTENTION = "torch._dynamo.eval_frame", "torch.nn.attention.flex_attention"
INDUCTOR_CONFIG = "torch._inductor.config"
_WRAPPER = "compile_wrapper"
_STANCE = tuple(f"{COMPILER}.{name}" for name in ("_callback_from_stance", "_stance", "DynamoStance"))
_AS_WRITTEN = "runs compiled functions in a region as they are written"
_FLEX_NAMES = ("_create_wrapped_callback", "_debug_get_cache_entry_list", "innermost_backend")


def skip_code(code: CodeType) -> None:
    """Make torch.compile run calls of `code` uncompiled; functions that `code` calls are compiled as usual."""
    _name("torch._dynamo.decorators.skip_code", "lets torch.compile go around regions", needed=False)(code)


@functools.cache
def flex_compiler() -> Any:
    """Return torch's compiler module, or None if it lacks a name that compiled calls of FlexAttention need."""
    compiler = importlib.import_module(COMPILER)
    return compiler if all(hasattr(compiler, name) for name in _FLEX_NAMES) else None


def check_compiler(as_written: Callable[[], AbstractContextManager[Any]]) -> None:
    """Check that memplug can make torch.compile run functions uncompiled, as regions require.

    Args:
        as_written: Makes a context in which no compiled code runs.

    Raises:
        UnsupportedVersionError: The compiler lacks a name, or would compile inside that context.
    """
    for name in _STANCE:
        try:
            _looked_up(name)
        except AttributeError:
            raise _lacks(name, _AS_WRITTEN) from None
    with as_written():
        is_disabled = _looked_up(_STANCE[0])(check_compiler) is None
    if not is_disabled:
        raise UnsupportedVersionError(
            f"torch {torch.__version__} ignores {_STANCE[1]}, with which memplug {_AS_WRITTEN}",
            f"Install {KNOWN}, or a newer memplug.",
        )


def compiled_call(frame: FrameType) -> tuple[Any, Any] | None:
    """Return the function that a frame of torch's compiler calls, and the list of cleanups that run after the call.

    Returns:
        (function, cleanups), or None if `frame` is not such a frame.
    """
    if frame.f_code.co_name != _WRAPPER or frame.f_globals.get("__name__") != COMPILER:
        return None
    return frame.f_locals.get("fn"), frame.f_locals.get("cleanups")


# -- activation checkpointing --

CheckpointFunction = _name("torch.utils.checkpoint.CheckpointFunction", "replaces reentrant checkpoints", needed=False)


def checkpoint_wrappers() -> tuple[type, ...]:
    """Return the class of modules that checkpoint another module (FSDP, torchtitan); empty if it is not imported."""
    module = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    found = getattr(module, "CheckpointWrapper", None)
    return () if found is None else (found,)


# -- the virtual device and estimates --

_LAB = "has a virtual device"

c10d = _name("torch._C._distributed_c10d", _LAB, needed=False)
new_process_group = _name("torch.distributed.distributed_c10d._new_process_group_helper", _LAB, needed=False)
PRIVATE_DEVICE_TYPE = _name("torch._C._autograd.DeviceType.PrivateUse1", _LAB, needed=False)
get_private_device_name = _name("torch._C._get_privateuse1_backend_name", _LAB, needed=False)
register_device_module = _name("torch._register_device_module", _LAB, needed=False)
fused_sdp_choice = _name("torch._fused_sdp_choice", "measures attention", needed=False)
TorchDispatchMode = _name("torch.utils._python_dispatch.TorchDispatchMode", "records values", needed=False)
