"""Lets compiled FlexAttention run compiled inside a region, as a unit.

All other compiled functions inside a region run uncompiled, so that memplug sees their operators (as_written.h).
Uncompiled, FlexAttention would store a score for each pair of tokens. So if a region calls
`torch.compile(flex_attention)`, with any backend, memplug lets torch compile it. Each call of the compiled graph is a
unit (memplug.tokenwise.engine.units). torch passes the graph all tensors that it reads, also those in the closures of
`mask_mod` and `score_mod`, as arguments. So the unit can call the graph again without entering the compiler.

| patched | on | why |
|---|---|---|
| `_callback_from_stance` | `torch._dynamo.eval_frame` | chooses the compiler of a compiled function |
| `setup_compilation_env` | `torch.nn.attention.flex_attention` | warns, once, if a compiled call runs uncompiled |

FlexAttention still runs uncompiled in a larger compiled function, and if it is compiled with CUDA graphs, since a CUDA
graph overwrites its earlier outputs. If the program compiled neither FlexAttention nor a caller of it, torch itself
warns.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from types import FrameType
from typing import Any

import torch

from memplug.errors import coded
from memplug.hooks.patching import patch
from memplug.session.attached import AttachedModel
from memplug.tokenwise.engine.core import core
from memplug.tokenwise.engine.operators import CaptureKind
from memplug.tokenwise.engine.units import Unit
from memplug.tokenwise.engine.watch import AddressMode
from memplug.torch_private import (
    FLEX_ATTENTION,
    INDUCTOR_CONFIG,
    KNOWN,
    compiled_call,
    flex_compiler,
    get_function_modes,
    pop_function_mode,
    push_function_mode,
)

log = logging.getLogger("memplug")
_unobserved: ContextVar[bool] = ContextVar("memplug: a compiled call is under way that a region does not observe")


def hook(attached: AttachedModel) -> None:
    """Run compiled calls of FlexAttention as units, or warn once if they run uncompiled, until the session detaches."""
    if attached.executor.device.torch_device.type not in ("cpu", "cuda"):
        return
    compiler = flex_compiler()
    if compiler is not None:  # if it is None, calls run uncompiled
        patch(compiler, "_callback_from_stance", _Callbacks(compiler).choose, attached, KNOWN)
    module = sys.modules.get(FLEX_ATTENTION)
    if hasattr(module, "setup_compilation_env"):  # without this function there is no warning
        patch(module, "setup_compilation_env", _Warning(attached).environment, attached, KNOWN)


class _Backend:
    """Wraps a compiler backend, so that each call of a compiled graph is a unit of the running region."""

    def __init__(self, compile_graph: Callable[..., Any]):
        self.compile_graph = compile_graph

    def __eq__(self, other: object) -> bool:
        """Return whether both wrap the same backend."""
        return isinstance(other, _Backend) and bool(self.compile_graph == other.compile_graph)

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, graph: Any, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """Compile a graph with the wrapped backend; return a function that runs it as a unit inside regions."""
        call = self.compile_graph(graph, inputs, **options)

        def run(*args: Any) -> Any:
            if not _unobserved.get(False):
                return call(*args)
            core().resume()
            try:
                executor = core().observing_executor()
                # there is no executor in a recompute pass or inside another unit
                if executor is None or not all(map(_is_plain, args)):
                    return call(*args)
                unit = Unit(executor, "flex_attention", CaptureKind.ATTENTION, puts_back=False)
                return unit.run(call, args, {})
            finally:
                core().pause()

        return run


class _Callbacks:
    """Chooses the compiler callback for `flex_attention` calls inside a region.

    Args:
        compiler: the module torch._dynamo.eval_frame.
    """

    def __init__(self, compiler: Any):
        self._compiler = compiler
        self._own: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._everywhere: weakref.WeakSet[Any] = weakref.WeakSet()

    def choose(self, original: Callable[[Any], Any], callback: Any) -> Any:
        """Return the compiler callback for the compiled function that the program is calling."""
        if not callable(callback):
            return original(callback)
        before = core().stance_before()
        if before is None and callback not in self._everywhere:
            return original(callback)
        call = compiled_call(sys._getframe(2))  # the caller of the patched function
        if call is None:  # another session's patch called, and has chosen already
            return original(callback)
        function, cleanups = call
        if not _is_flex_attention(function) or not isinstance(cleanups, list):
            return original(callback)
        if before is None:
            return original(self._own[callback])  # outside regions: reuse the code that was compiled in a region
        if before != self._compiler.DynamoStance() or self._compiler._stance.stance != "force_eager":
            return original(callback)  # the program has set a stance of its own
        own = self._own_of(callback, function)
        if own is None:
            return original(callback)
        cleanups.append(_leave_region())  # cleanups run after the call, even if it raises
        return own

    def _own_of(self, callback: Any, function: Any) -> Any:
        """Return memplug's replacement for a program's compiler callback, or None to use the program's."""
        if callback not in self._own:
            backend = self._compiler.innermost_backend(callback)
            if _has_cuda_graphs(backend):
                return None
            if not self._has_compiled(backend, function):
                self._everywhere.add(callback)
            self._own[callback] = self._compiler._create_wrapped_callback(_Backend(backend))
        return self._own[callback]

    def _has_compiled(self, backend: Any, function: Any) -> bool:
        """Return whether the program's own backend has compiled the function already, in a call outside regions."""
        entries = self._compiler._debug_get_cache_entry_list(function.__code__)
        return any(entry.backend == backend for entry in entries)


class _Warning:
    """Warns once if compiled calls run uncompiled inside regions."""

    def __init__(self, attached: AttachedModel):
        self._executor = weakref.ref(attached.executor)  # weak, for a session that is dropped without detaching
        self._told = False

    def environment(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the original `setup_compilation_env`, after a warning (once) if a compiled call runs uncompiled."""
        if not self._told and self._is_of_a_region() and _is_compiled_by_a_caller(sys._getframe()):
            self._told = True
            text = (
                "memplug: FlexAttention is not compiled inside of regions here, and stores a score for each pair of "
                "tokens. Compile it alone, with `torch.compile(flex_attention)` and without CUDA graphs, let the model "
                'use another attention, or leave its layers out of "tokenwise.regions".'
            )
            log.warning(coded("MP023", text))
        return original(*args, **kwargs)

    def _is_of_a_region(self) -> bool:
        """Return whether the call runs uncompiled because it is in a region."""
        executor = self._executor()
        return executor is not None and executor.core.observes() and core().stance_before().stance == "default"


def _leave_region() -> Callable[[], None]:
    """Leave the region while torch compiles the call, or checks the guards of compiled code.

    The guards then find the same state in all forwards of the region.

    Returns:
        A function that enters the region again.
    """
    modes = [pop_function_mode() for _ in get_function_modes()]
    for mode in reversed(modes):
        if not isinstance(mode, AddressMode):  # memplug's own mode, present only in a region's first forwards
            push_function_mode(mode)
    core().pause()
    token = _unobserved.set(True)

    def back() -> None:
        _unobserved.reset(token)
        core().resume()
        for _ in get_function_modes():
            pop_function_mode()
        for mode in reversed(modes):
            push_function_mode(mode)

    return back


def _is_plain(value: Any) -> bool:
    """Return whether a value is a plain tensor or no tensor at all; tapes do not support tensor subclasses."""
    return not isinstance(value, torch.Tensor) or type(value) in (torch.Tensor, torch.nn.Parameter)


def _is_flex_attention(function: Any) -> bool:
    return (getattr(function, "__module__", ""), getattr(function, "__name__", "")) == (
        FLEX_ATTENTION,
        "flex_attention",
    )


def _has_cuda_graphs(backend: Any) -> bool:
    config = getattr(backend, "config", None)
    inductor = sys.modules.get(INDUCTOR_CONFIG)
    by_default = inductor is not None and inductor.triton.cudagraphs
    named = config.get("triton.cudagraphs", by_default) if isinstance(config, dict) else by_default
    return bool(named) or getattr(backend, "compiler_name", "") == "cudagraphs"


def _is_compiled_by_a_caller(frame: FrameType | None) -> bool:
    """Return whether the program compiled `flex_attention` or a caller of it; functions that it calls do not count."""
    is_inside = True
    while frame is not None:
        code = frame.f_code
        if is_inside:
            is_inside = not (code.co_name == "flex_attention" and frame.f_globals.get("__name__") == FLEX_ATTENTION)
        elif compiled_call(frame) is not None:
            return True
        frame = frame.f_back
    return False
