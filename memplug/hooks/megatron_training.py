"""Patches Megatron-LM's own training loop (as in `pretrain_gpt.py`), to attach to its model and to mark its steps.

| patched | on | why |
|---|---|---|
| `setup_model_and_optimizer` | `megatron.training.training` | to attach to the model chunks that it returns |
| `train_step` | `megatron.training.training` | the end of a training step |

`megatron.training` comes with Megatron-LM's repository, not with the package megatron-core.
"""

from __future__ import annotations

import importlib
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


def install(attach: Callable[..., Session], config: MemplugConfig) -> None:
    """Patch the training loop to attach to its model and to mark its steps; a second call does nothing.

    Args:
        attach: called with the model chunks and the block.
        config: the "memplug" block; if it is off, nothing is patched.

    Raises:
        PatchError: `megatron.training` cannot be imported, or lacks one of the functions.
    """
    if not config.active:
        log.info('memplug: off: the "memplug" block says so')
        return
    try:
        training = importlib.import_module(MODULE)
    except ImportError as error:
        raise PatchError(
            MODULE,
            f"Megatron-LM's repository, {VERSIONS}",
            f"Start the script from Megatron-LM's repository, or put that on PYTHONPATH ({error}). In a loop of your "
            "own, call `memplug.attach(chunks, config)`.",
        ) from error
    missing = [name for name in _NAMES if not hasattr(training, name)]
    if missing:
        raise PatchError(f"{MODULE}.{missing[0]}", f"Megatron-LM's repository, {VERSIONS}")
    if hasattr(training.train_step, ORIGINAL):
        return
    sessions: list[Session] = []

    def set_up(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
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
