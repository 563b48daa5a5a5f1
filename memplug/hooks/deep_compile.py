"""Refuses DeepSpeed's DeepCompile on an engine that memplug is attached to.

AutoSP and AutoTP, two of its passes, rewrite one graph of the whole model, without a break around regions. Its ZeRO
passes take over the gathering of parameters, which code outside of their graphs, such as a region, would lack.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memplug.errors import ConflictError
from memplug.hooks.patching import patch
from memplug.session.attached import AttachedModel
from memplug.session.table import Stage


def refuse(engine: Any, attached: AttachedModel, versions: str) -> None:
    """Make the engine's `compile` raise `ConflictError` if DeepCompile compiles the model, until the session detaches.

    With DeepCompile configured, `compile` may still fall back to torch.compile, which goes around the regions.

    Args:
        engine: the DeepSpeed engine.
        attached: its session.
        versions: the versions of DeepSpeed that memplug supports, for a message.

    Raises:
        PatchError: the engine has no `compile`.
    """
    # DeepSpeed 0.16.5 has neither; a release with only the second one tells no fallback
    is_active = getattr(engine, "is_deepcompile_active", None) or getattr(engine, "is_deepcompile_enabled", None)
    if is_active is None:
        return

    def compile_(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if attached.stage is not Stage.DETACHED and is_active():
            raise ConflictError(
                "DeepCompile compiles the engine's whole model, and memplug needs to see the operators of its regions "
                "and where training is",
                'Leave out `"compile": {"deepcompile": true}`: `engine.compile()` then goes around the regions. Or '
                'switch memplug off for this engine: `"memplug": {"enabled": false}`.',
                code="MP003",
            )
        return result

    patch(engine, "compile", compile_, attached, versions)
