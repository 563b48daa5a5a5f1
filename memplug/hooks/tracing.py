"""Keeps parts of an attached model's forward out of torch.compile, and out of programs that torch traces.

Tracers are torch.export, make_fx, torch.fx and torch.jit.trace.
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
    """Return a function that calls `run`, or `traced` while torch traces a program.

    In a strict export, Dynamo traces `traced`; otherwise Dynamo breaks the graph around `run`. If Dynamo is not active,
    the function calls `run` without the wrapper that disables Dynamo, since the wrapper would cost more than a hook.

    Args:
        run: the function for ordinary calls.
        traced: the function for traced programs.
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

    # otherwise Dynamo would compile `choose` again for each module, and give up after eight
    skip_code(choose.__code__)
    return functools.update_wrapper(choose, run)


def nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing; stands in for a function that only observes, while torch traces."""
