"""Parts of an attached model's forward that torch.compile does not look into, and that are no part of a program that
torch traces: torch.export, make_fx, torch.fx, torch.jit.trace.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from memplug.tokenwise.engine.as_they_are import is_traced
from memplug.torch_private import get_eval_frame_callback, skip_code

REASON = (
    "memplug needs to see the operators of its regions, and where training is: leave out `fullgraph=True`, or call "
    "`session.detach()` before"
)

Call = Callable[..., Any]

_disable = (
    functools.partial(torch.compiler.disable, reason=REASON)
    if "reason" in inspect.signature(torch.compiler.disable).parameters
    else torch.compiler.disable
)
_is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)  # torch 2.6 has none


def outside(run: Call, traced: Call) -> Call:
    """Returns what calls `run`, and `traced` in its place where torch traces a program.

    Dynamo, which is asked for strict exports too, traces the choice; else it goes around `run`. Where Dynamo is not at
    work, nothing keeps it away, which would take longer than a hook.
    """
    is_dynamo_compiling = torch.compiler.is_dynamo_compiling

    @_disable
    @functools.wraps(run)
    def around(*args: Any, **kwargs: Any) -> Any:
        return (traced if is_traced() else run)(*args, **kwargs)

    def choose(*args: Any, **kwargs: Any) -> Any:
        if not is_dynamo_compiling() and get_eval_frame_callback() is None:
            return (traced if is_traced() else run)(*args, **kwargs)
        return traced(*args, **kwargs) if _is_exporting() else around(*args, **kwargs)

    # dynamo would try to compile each module's for itself, and give up after eight
    skip_code(choose.__code__)
    return functools.update_wrapper(choose, run)


def nothing(*args: Any, **kwargs: Any) -> None:
    """Does nothing, in the place of what only counts."""
