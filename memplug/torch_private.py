"""Every private or unstable name of torch that memplug's Python uses. Those of the C++ are in `native/torch_private.h`.

`check` says at attach which of them the installed torch lacks, before a step fails on one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from memplug.errors import UnsupportedVersionError


class Name(NamedTuple):
    """One of them.

    Attributes:
        path: from "torch" on.
        known: versions of torch that have it, as far as they were read.
        use: what memplug does by it, to follow "memplug".
    """

    path: str
    known: str
    use: str


NAMES = (
    Name("torch._C._current_graph_task_id", "2.6 to 2.13", "tells forwards that backward runs again from training's own"),
    Name("torch._C._functorch.peek_interpreter_stack", "2.6 to 2.13", "lets regions in function transforms run as they are"),
    Name("torch._C._functorch.is_functorch_wrapped_tensor", "2.6 to 2.13", "leaves tensors of function transforms alone"),
    Name("torch._C._vmapmode_increment_nesting", "2.6 to 2.13", "recomputes outside of batched gradients"),
    Name("torch._C._vmapmode_decrement_nesting", "2.6 to 2.13", "recomputes outside of batched gradients"),
    Name(
        "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",
        "2.6 to 2.13",
        "recomputes outside of function transforms",
    ),
    Name("torch._C._autograd._saved_tensors_hooks_is_enabled", "2.6 to 2.13", "finds out whether it may save tensors"),
    Name("torch._C._TorchDispatchModeKey", "2.6 to 2.13", "knows programs that torch traces"),
    Name("torch._C._get_dispatch_mode", "2.6 to 2.13", "knows programs that torch traces"),
    Name("torch._C._len_torch_dispatch_stack", "2.6 to 2.13", "knows programs that torch traces"),
    Name("torch.fx._symbolic_trace._is_fx_tracing_flag", "2.6 to 2.13", "knows programs that torch.fx traces"),
    Name("torch.autograd.forward_ad._current_level", "2.6 to 2.13", "knows forward-mode differentiation"),
    Name("torch.autograd._unsafe_preserve_version_counter", "2.6 to 2.13", "puts buffers back for a recompute pass"),
    Name("torch.overrides._get_current_function_mode_stack", "2.6 to 2.13", "compiles FlexAttention outside of its modes"),
    Name("torch.overrides._push_mode", "2.6 to 2.13", "compiles FlexAttention outside of its modes"),
    Name("torch.overrides._pop_mode", "2.6 to 2.13", "compiles FlexAttention outside of its modes"),
    Name("torch.utils._device.DeviceContext", "2.6 to 2.13", "recomputes with the default device of the forward"),
    Name("torch.distributed.distributed_c10d._get_default_store", "2.6 to 2.13", "has ranks agree"),
    Name("torch._dynamo.eval_frame.DynamoStance", "2.6 to 2.15", "runs what is compiled in a region as it is written"),
    Name("torch._dynamo.eval_frame._stance", "2.6 to 2.15", "runs what is compiled in a region as it is written"),
    Name("torch._dynamo.decorators.skip_code", "2.6 to 2.13", "lets torch.compile go around regions"),
)


def _found(path: str) -> Any:
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise AttributeError(path)


def check() -> None:
    """Find every name.

    Raises:
        UnsupportedVersionError: the installed torch lacks one.
    """
    for name in NAMES:
        try:
            _found(name.path)
        except AttributeError:
            raise UnsupportedVersionError(
                f"torch {torch.__version__} has no {name.path}, by which memplug {name.use}; torch {name.known} has it",
                f"Install torch {name.known}, or a newer memplug.",
            ) from None


def lazily(path: str) -> Callable[..., Any]:
    """Returns what calls a function by its name, which `check` has found or will."""
    try:
        return _found(path)
    except AttributeError:

        def absent(*args: Any, **kwargs: Any) -> Any:
            check()

        return absent


current_graph_task_id: Callable[[], int] = lazily("torch._C._current_graph_task_id")
peek_interpreter_stack = lazily("torch._C._functorch.peek_interpreter_stack")
is_functorch_wrapped_tensor = lazily("torch._C._functorch.is_functorch_wrapped_tensor")
vmapmode_increment_nesting = lazily("torch._C._vmapmode_increment_nesting")
vmapmode_decrement_nesting = lazily("torch._C._vmapmode_decrement_nesting")
temporarily_clear_interpreter_stack = lazily("torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack")
saved_tensors_hooks_is_enabled = lazily("torch._C._autograd._saved_tensors_hooks_is_enabled")
unsafe_preserve_version_counter = lazily("torch.autograd._unsafe_preserve_version_counter")
function_modes = lazily("torch.overrides._get_current_function_mode_stack")
push_function_mode = lazily("torch.overrides._push_mode")
pop_function_mode = lazily("torch.overrides._pop_mode")
default_store = lazily("torch.distributed.distributed_c10d._get_default_store")
