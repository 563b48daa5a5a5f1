"""A callback for transformers' Trainer, and for those built on it (TRL's), in training without DeepSpeed."""

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
    """Attaches when training begins, marks each optimizer step, detaches when training ends.

    Where training ends in an error there is no hook: the session stays attached until the next training begins, or
    `callback.end()`. Under DeepSpeed it does nothing, since `memplug.install()` attaches to the engine.

    Example:
        >>> trainer.add_callback(MemplugCallback("ds.json"))
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **others: Any
    ) -> None:
        """The model is on its device, and whatever wraps it wraps it already."""
        self.begin(model, deepspeed=getattr(args, "deepspeed_plugin", None) is not None)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """After the optimizer; micro-batches before that end in `on_substep_end`."""
        self.end_step()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Undo everything."""
        self.end()
