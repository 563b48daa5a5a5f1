"""Patches Megatron-LM's own training loop (as in `pretrain_gpt.py`), to attach to its model and to mark its steps.

| patched | on | why |
|---|---|---|
| `setup_model_and_optimizer` | `megatron.training.training` | to attach to the model chunks that it returns |
| `train_step` | `megatron.training.training` | the end of a training step |

`megatron.training` comes with Megatron-LM's repository, not with the package megatron-core.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from memplug.config import MemplugConfig
from memplug.errors import PatchError
from memplug.hooks.megatron import VERSIONS
from memplug.hooks.patching import ORIGINAL, put_back, wrapped
from memplug.session.session import Session

log = logging.getLogger("memplug")

MODULE = "megatron.training.training"
_NAMES = ("setup_model_and_optimizer", "train_step")


def install(
    attach: Callable[..., Session],
    config: MemplugConfig | None,
    off: Callable[[str], None] = lambda reason: None,
) -> None:
    """Patch the imported training loop to attach to its model and to mark its steps; a second call does nothing.

    Args:
        attach: called with the model chunks and the block.
        config: the "memplug" block; if it is off, nothing is patched. None to leave the model alone.
        off: called with the reason if the model is left alone; "" if the block says `"enabled": false`.

    Raises:
        PatchError: the module lacks one of the functions.
    """
    if config is not None and not config.active:
        log.debug('memplug: off: the "memplug" block says so')
        off("")
        return
    training = sys.modules[MODULE]
    missing = [name for name in _NAMES if not hasattr(training, name)]
    if missing:
        raise PatchError(f"{MODULE}.{missing[0]}", f"Megatron-LM's repository, {VERSIONS}")
    if hasattr(training.train_step, ORIGINAL):
        return
    sessions: list[Session] = []

    def set_up(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if config is None:
            log.debug("memplug: off for this model of Megatron-LM, which has no block: give one by `--config FILE`")
            off("Megatron-LM's model has no block: give one by `--config FILE`")
        else:
            sessions.append(attach(result[0], config))
        return result

    def train_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        for session in sessions:
            session.step()
        return result

    for name, wrapper in zip(_NAMES, (set_up, train_step), strict=True):
        setattr(training, name, wrapped(getattr(training, name), wrapper))


def uninstall() -> None:
    """Restore the original functions; sessions stay attached."""
    put_back(sys.modules.get(MODULE), *_NAMES)
