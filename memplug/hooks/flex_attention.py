"""FlexAttention inside of a region: a program that compiled it is told that it runs uncompiled there.

Inside of a region compiled functions run as they are written, so that their operators are observed
(memplug/native/as_written.h). FlexAttention written out has a score for each pair of tokens, which is what a caller
compiles it for, and its tensors of a subclass make the region opaque.

| patched | on | why |
|---|---|---|
| `flex_attention_hop` | `torch.nn.attention.flex_attention` | its first call inside of a region is told, once |

Where no caller has compiled it, torch itself warns.
"""

from __future__ import annotations

import logging
import sys
import weakref
from types import FrameType
from typing import Any

import torch

from memplug.hooks.patching import patch
from memplug.session import Session

VERSIONS = "torch 2.13 to 2.15"  # an older one may have another name for the frame: then nothing is told

_MODULE = "torch.nn.attention.flex_attention"

log = logging.getLogger("memplug")


def hook(session: Session) -> None:
    """Warn once where regions run FlexAttention that was compiled, until the session is detached."""
    module = sys.modules.get(_MODULE)
    if not hasattr(module, "flex_attention_hop"):
        return  # the program has not imported it, or this torch has it elsewhere: there is only a warning to lose
    held, told = weakref.ref(session.executor), False  # a session that is dropped without detaching is not kept

    def operator(original: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal told
        core = None if told or torch.compiler.is_dynamo_compiling() or (executor := held()) is None else executor.core
        if core is not None and core.observes() and _is_compiled_by_a_caller(sys._getframe()):
            told = True
            log.warning(
                "memplug: FlexAttention is not compiled inside of regions: it runs as it is written, with a score "
                'for each pair of tokens. Let the model use another attention (attn_implementation="sdpa" or '
                '"flash_attention_2"), or leave its layers out of "tokenwise.regions".'
            )
        return original(*args, **kwargs)

    patch(module, "flex_attention_hop", operator, session, VERSIONS)


def _is_compiled_by_a_caller(frame: FrameType | None) -> bool:
    """Whether a function that calls `flex_attention`, or it itself, was compiled; what it compiles does not count."""
    is_inside = True
    while frame is not None:
        code = frame.f_code
        if is_inside:
            is_inside = not (code.co_name == "flex_attention" and frame.f_globals.get("__name__") == _MODULE)
        elif code.co_name == "compile_wrapper" and frame.f_globals.get("__name__") == "torch._dynamo.eval_frame":
            return True
        frame = frame.f_back
    return False
