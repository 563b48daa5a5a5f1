"""Adds memplug's callback to the trainers of scripts that do not mention memplug, while they train.

| patched | on | why |
|---|---|---|
| `train` | `transformers.trainer.Trainer` | to add the callback, and to detach even if training fails |
| `fit` | the `Trainer` of `lightning.pytorch` or `pytorch_lightning` | the same |

Under DeepSpeed memplug attaches to the engine instead, and adds no callback.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from memplug.config import MemplugConfig
from memplug.errors import PatchError
from memplug.hooks.patching import ORIGINAL, put_back, wrapped
from memplug.integrations.attachment import Attachment

TRANSFORMERS = "transformers.trainer"
LIGHTNING = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")

Off = Callable[[str], None]


def install_transformers(attach: Any, config: MemplugConfig | None, off: Off) -> None:
    """Patch the `Trainer` of transformers, once imported; a second call does nothing.

    Args:
        attach: not used, since the callback attaches.
        config: the block; if it is off, nothing is patched. None to add no callback.
        off: called with the reason if a model is left alone; "" if memplug attached, or if the block is off.

    Raises:
        PatchError: the module lacks `Trainer.train`.
    """

    def under_deepspeed(trainer: Any) -> bool:
        return getattr(trainer.args, "deepspeed_plugin", None) is not None

    _install(TRANSFORMERS, "train", config, off, under_deepspeed, lambda trainer: trainer.callback_handler.callbacks)


def install_lightning(module: str, attach: Any, config: MemplugConfig | None, off: Off) -> None:
    """Patch the `Trainer` of Lightning, once imported; a second call does nothing.

    Args:
        module: one of `LIGHTNING`.
        attach: as in `install_transformers`.
        config: as in `install_transformers`.
        off: as in `install_transformers`.

    Raises:
        PatchError: the module lacks `Trainer.fit`.
    """

    def under_deepspeed(trainer: Any) -> bool:
        return any(base.__name__ == "DeepSpeedStrategy" for base in type(trainer.strategy).__mro__)

    _install(module, "fit", config, off, under_deepspeed, lambda trainer: trainer.callbacks)


def uninstall() -> None:
    """Restore the original methods; sessions stay attached."""
    for module, name in ((TRANSFORMERS, "train"), *((each, "fit") for each in LIGHTNING)):
        put_back(getattr(sys.modules.get(module), "Trainer", None), name)


def _install(
    module: str,
    method: str,
    config: MemplugConfig | None,
    off: Off,
    under_deepspeed: Callable[[Any], bool],
    callbacks_of: Callable[[Any], list[Any]],
) -> None:
    if config is not None and not config.active:
        off("")
        return
    package = module.partition(".")[0]
    owner = getattr(sys.modules[module], "Trainer", None)
    original = getattr(owner, method, None)
    if original is None:
        raise PatchError(f"{module}.Trainer.{method}", "transformers 5, lightning 2.5 or newer")
    if hasattr(original, ORIGINAL):
        return

    def train(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        if under_deepspeed(trainer):
            return original(trainer, *args, **kwargs)
        own = _attachments(callbacks_of(trainer))
        if own or config is None:
            result = original(trainer, *args, **kwargs)
            attached = any(callback.session is not None for callback in own)
            off("" if attached else f"the Trainer of {package} has no block: give one by `--config FILE`")
            return result
        callback = _callback(package, config)
        callback.launched = off
        callbacks_of(trainer).append(callback)
        try:
            return original(trainer, *args, **kwargs)
        finally:
            callback.end()
            if callback in callbacks_of(trainer):
                callbacks_of(trainer).remove(callback)

    setattr(owner, method, wrapped(original, train))


def _attachments(callbacks: Sequence[Any]) -> list[Attachment]:
    return [callback for callback in callbacks if isinstance(callback, Attachment)]


def _callback(package: str, config: MemplugConfig) -> Attachment:
    name = "transformers" if package == "transformers" else "lightning"
    return importlib.import_module(f"memplug.integrations.{name}").MemplugCallback(config)
