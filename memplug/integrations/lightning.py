"""A callback for Lightning's Trainer (`lightning` or `pytorch_lightning`), for training without DeepSpeed."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from memplug.errors import MemplugError
from memplug.hooks.deepspeed import is_engine
from memplug.integrations.attachment import Attachment, Config

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _callback_class() -> type:
    """Return the `Callback` class of the package that the script has imported; both may be installed."""
    errors = []
    for package in sorted(PACKAGES, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(package).Callback
        except ImportError as error:
            errors.append(error)
    raise MemplugError(
        "memplug.integrations.lightning needs lightning, which cannot be imported",
        f"Run `pip install 'lightning>=2.5'` ({errors[0]}).",
    ) from errors[0]


class MemplugCallback(Attachment, _callback_class()):
    """Attaches when training starts, marks each optimizer step, and detaches when training ends or fails.

    Under DeepSpeed's strategy the callback does nothing, since `memplug.install()` attaches to the engine.

    Example:
        >>> Trainer(callbacks=[MemplugCallback("ds.json")])
    """

    def __init__(self, config: Config = None) -> None:
        super().__init__(config)
        self._steps = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach, now that the module is on its device and the strategy has wrapped it."""
        self._steps = trainer.global_step
        self.begin(pl_module, deepspeed=is_engine(trainer.strategy.model))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Tell the session that a batch begins, since `training_step` may not call the module's `forward`."""
        self.begin_batch()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Mark the end of one step if any optimizers have stepped in this batch."""
        if trainer.global_step != self._steps:
            self._steps = trainer.global_step
            self.end_step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Detach."""
        self.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Detach."""
        self.end()
