"""Attaches to the engines and models of a script that does not mention memplug."""

from __future__ import annotations

from collections.abc import Callable

from memplug.config import MemplugConfig
from memplug.hooks import deepspeed, megatron_training
from memplug.session.session import Session


def install(
    module: str, attach: Callable[..., Session], config: MemplugConfig | None, off: Callable[[str], None]
) -> None:
    """Patch a framework's entry, so that memplug attaches to each engine or model that the script makes with it.

    Args:
        module: the framework's imported module: "deepspeed" or "megatron.training.training".
        attach: called with an engine or a list of model chunks, and its block.
        config: the block for engines and models that bring none; None to leave them alone.
        off: called with the reason if an engine or a model is left alone; "" if a block says `"enabled": false`.

    Raises:
        PatchError: the module lacks the entry.
    """
    entries = {"deepspeed": deepspeed.install, megatron_training.MODULE: megatron_training.install}
    entries[module](attach, config, off)
