"""FlexAttention that a program has compiled: a call of it inside of a region runs compiled, as a unit.

All other functions that are compiled inside of a region run as they are written, so that their operators are observed
(as_written.h). FlexAttention written out has a score for each pair of tokens, which is what it is
compiled for. So where `torch.compile(flex_attention)` is called there, with whatever backend, the compiler is called,
and a call of each graph that it makes is a unit (memplug.tokenwise.engine.units): all tensors that it reads, those in
the closures of masks and scores among them, are its arguments, and it runs again without asking the compiler.

| patched | on | why |
|---|---|---|
| `_callback_from_stance` | `torch._dynamo.eval_frame` | asked by what a compiled function is compiled |
| `setup_compilation_env` | `torch.nn.attention.flex_attention` | tells, once, of compiled ones that run as written |

Left as they are written: a compiled function that calls FlexAttention among other things, and one with CUDA graphs,
which overwrite what they returned. Where no caller has compiled it, torch itself warns.
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
    """Let compiled calls be units, and warn once where they cannot, until the session is detached."""
    if attached.executor.device.torch_device.type not in ("cpu", "cuda"):
        return
    compiler = flex_compiler()
    if compiler is not None:  # else calls run as they are written
        patch(compiler, "_callback_from_stance", _Callbacks(compiler).choose, attached, KNOWN)
    module = sys.modules.get(FLEX_ATTENTION)
    if hasattr(module, "setup_compilation_env"):  # else there is only a warning to lose
        patch(module, "setup_compilation_env", _Warning(attached).environment, attached, KNOWN)


class _Backend:
    """Compiles as another backend does; each call of what it makes is a unit of the region that runs."""

    def __init__(self, compile_graph: Callable[..., Any]):
        self.compile_graph = compile_graph

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Backend) and bool(self.compile_graph == other.compile_graph)

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, graph: Any, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        call = self.compile_graph(graph, inputs, **options)

        def run(*args: Any) -> Any:
            if not _unobserved.get(False):
                return call(*args)
            core().resume()
            try:
                executor = core().observing_executor()
                if executor is None or not all(map(_is_plain, args)):  # in a recompute pass, or inside of another unit
                    return call(*args)
                unit = Unit(executor, "flex_attention", CaptureKind.ATTENTION, puts_back=False)
                return unit.run(call, args, {})
            finally:
                core().pause()

        return run


class _Callbacks:
    """By what calls of FlexAttention are compiled, in place of what their program says.

    Args:
        compiler: torch._dynamo.eval_frame.
    """

    def __init__(self, compiler: Any):
        self._compiler = compiler
        self._own: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._everywhere: weakref.WeakSet[Any] = weakref.WeakSet()

    def choose(self, original: Callable[[Any], Any], callback: Any) -> Any:
        """Of a compiled function that is being called."""
        if not callable(callback):
            return original(callback)
        before = core().stance_before()
        if before is None and callback not in self._everywhere:
            return original(callback)
        call = compiled_call(sys._getframe(2))  # behind the patch
        if call is None:  # it is another session's patch that asks
            return original(callback)
        function, cleanups = call
        if not _is_flex_attention(function) or not isinstance(cleanups, list):
            return original(callback)
        if before is None:
            return original(self._own[callback])  # what a region has compiled already, such as one that runs plain now
        if before != self._compiler.DynamoStance() or self._compiler._stance.stance != "force_eager":
            return original(callback)  # the program wants it otherwise
        own = self._own_of(callback, function)
        if own is None:
            return original(callback)
        cleanups.append(_leave_region())  # they are called behind the call, whatever becomes of it
        return own

    def _own_of(self, callback: Any, function: Any) -> Any:
        """Ours in its place; None: it stays."""
        if callback not in self._own:
            backend = self._compiler.innermost_backend(callback)
            if _has_cuda_graphs(backend):
                return None
            if not self._has_compiled(backend, function):
                self._everywhere.add(callback)
            self._own[callback] = self._compiler._create_wrapped_callback(_Backend(backend))
        return self._own[callback]

    def _has_compiled(self, backend: Any, function: Any) -> bool:
        """Whether the program's own calls have been compiled, outside of regions."""
        entries = self._compiler._debug_get_cache_entry_list(function.__code__)
        return any(entry.backend == backend for entry in entries)


class _Warning:
    """Of calls that run as they are written, and were compiled."""

    def __init__(self, attached: AttachedModel):
        self._executor = weakref.ref(attached.executor)  # a session that is dropped without detaching is not kept
        self._told = False

    def environment(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What FlexAttention as it is written enters."""
        if not self._told and self._is_of_a_region() and _is_compiled_by_a_caller(sys._getframe()):
            self._told = True
            text = (
                "memplug: FlexAttention is not compiled inside of regions here: it runs as it is written, with a score "
                "for each pair of tokens. Compile it by itself, `torch.compile(flex_attention)`, without CUDA graphs, "
                "let the model use another attention, or leave its layers out of "
                '"tokenwise.regions".'
            )
            log.warning(coded("MP023", text))
        return original(*args, **kwargs)

    def _is_of_a_region(self) -> bool:
        """Whether one is why nothing is compiled."""
        executor = self._executor()
        return executor is not None and executor.core.observes() and core().stance_before().stance == "default"


def _leave_region() -> Callable[[], None]:
    """Compiling and its checks are no part of a region, and meet the same state in all of its forwards; returns the way
    back.
    """
    modes = [pop_function_mode() for _ in get_function_modes()]
    for mode in reversed(modes):
        if not isinstance(mode, AddressMode):  # the first forwards have it, later ones do not
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
    """Not of a subclass, which no tape can name."""
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
    """Whether a function that calls `flex_attention`, or it itself, was compiled; what it compiles does not count."""
    is_inside = True
    while frame is not None:
        code = frame.f_code
        if is_inside:
            is_inside = not (code.co_name == "flex_attention" and frame.f_globals.get("__name__") == FLEX_ATTENTION)
        elif compiled_call(frame) is not None:
            return True
        frame = frame.f_back
    return False
