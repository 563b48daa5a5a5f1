"""A callback for transformers' Trainer and trainers built on it (TRL's), for training without DeepSpeed."""

from __future__ import annotations

from typing import Any

from torch import nn

from memplug.errors import MemplugError
from memplug.integrations.attachment import Attachment

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise MemplugError(
        "memplug.integrations.transformers needs transformers, which cannot be imported",
        f"Run `pip install 'transformers>=5.0'` ({error}).",
    ) from error


class MemplugCallback(Attachment, TrainerCallback):
    """Attaches when training begins, marks each optimizer step, and detaches when training ends.

    Trainer does not tell callbacks when training fails. The session then stays attached until the next training begins,
    or until `callback.end()`. Under DeepSpeed the callback does nothing, since `memplug.install()` attaches to the
    engine.

    Example:
        >>> trainer.add_callback(MemplugCallback("ds.json"))
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **others: Any
    ) -> None:
        """Attach, now that the model is on its device and all wrappers are in place."""
        self.begin(model, deepspeed=getattr(args, "deepspeed_plugin", None) is not None)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Mark the end of a step; Trainer calls this after the optimizer, not after each micro-batch."""
        self.end_step()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Detach."""
        self.end()
