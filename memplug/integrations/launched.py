"""Attaches to the engines and models of a script that does not mention memplug."""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

from memplug.config import MemplugConfig, block_in
from memplug.hooks import deepspeed, megatron_training
from memplug.hooks.attach import attach
from memplug.integrations import unchanged
from memplug.startup.outcome import Outcome
from memplug.startup.settings import RunSettings

log = logging.getLogger("memplug")

ENTRIES = {
    "deepspeed": deepspeed.install,
    megatron_training.MODULE: megatron_training.install,
    unchanged.TRANSFORMERS: unchanged.install_transformers,
    **{module: functools.partial(unchanged.install_lightning, module) for module in unchanged.LIGHTNING},
}
"""Functions that patch a framework's module once it is imported, by the module's name."""


def imported(module: str, settings: str) -> None:
    """Patch a framework in a process of `memplug run`.

    Args:
        module: the module that was imported, a key of `ENTRIES`.
        settings: the text of the run's `RunSettings`.

    Raises:
        ConfigError: the block cannot be used.
        PatchError: the module lacks a function that memplug patches.
    """
    run = RunSettings.read(settings)
    install(module, None if run.config is None else block_in(run.config), Outcome(run.notes))


def install(module: str, config: MemplugConfig | None, outcome: Outcome) -> None:
    """Patch an imported framework: memplug attaches to each engine or model that the script makes with it.

    Args:
        module: the framework's module, a key of `ENTRIES`.
        config: the block for engines and models without one; None to leave them alone.
        outcome: gets a note of the import, and of each engine or model.

    Raises:
        PatchError: the module lacks a function that memplug patches.
    """
    outcome.note("imported", module)
    show_log()

    @functools.wraps(attach)
    def attached(*args: Any, **kwargs: Any) -> Any:
        session = attach(*args, **kwargs)
        outcome.note("settled")
        return session

    ENTRIES[module](attached, config, outcome.leave)


def show_log() -> None:
    """Show memplug's log lines on stderr unless the script sets up logging; a second call does nothing."""
    if not any(isinstance(handler, _Fallback) for handler in log.handlers):
        log.addHandler(_Fallback())
        log.setLevel(logging.INFO)


class _Fallback(logging.StreamHandler):
    """Shows memplug's log lines on stderr unless the script has set up logging."""

    def emit(self, record: logging.LogRecord) -> None:
        """Emit on rank 0 only, like all of memplug's lines."""
        if not logging.getLogger().handlers and os.environ.get("RANK", "0") == "0":
            super().emit(record)
