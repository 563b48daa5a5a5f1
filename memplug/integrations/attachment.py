"""The base class of the callbacks: one session for each training, or the engine's session under DeepSpeed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from memplug.config import MemplugConfig, load_config
from memplug.hooks.attach import attach
from memplug.hooks.regions import attached_to
from memplug.session.attached import AttachedModel
from memplug.session.session import Session

log = logging.getLogger("memplug")

Config = Mapping[str, Any] | str | Path | MemplugConfig | None


class Attachment:
    """A mix-in for a framework's callback: attaches, marks steps and detaches.

    Args:
        config: the block as a dict, or the path of a JSON that has it; None for `{"enabled": true}`.

    Attributes:
        session: session of the current or the last training, for `report()`; under DeepSpeed, the engine's session.
            None if there is no session.
        launched: called with "" once there is a session, if `memplug run` added this callback; it then logs nothing
            about DeepSpeed, whose engines `memplug run` patches. None if the script did.

    Raises:
        ConfigError: the block is invalid.
    """

    def __init__(self, config: Config = None) -> None:
        super().__init__()
        self.config = load_config({"enabled": True} if config is None else config)
        self.session: Session | None = None
        self.launched: Callable[[str], None] | None = None
        self._attached: AttachedModel | None = None  # None unless this callback has attached
        self._told = False

    def begin(self, model: nn.Module, deepspeed: bool) -> None:
        """Attach to the model, unless DeepSpeed trains it, or a session exists already.

        Args:
            model: the model to attach to.
            deepspeed: whether DeepSpeed trains the model.

        Raises:
            ConflictError: as in `memplug.attach`.
            RegionError: as in `memplug.attach`.
            UnsupportedVersionError: as in `memplug.attach`.
        """
        self._begin(model, deepspeed)
        if self.launched is not None and self.session is not None:
            self.launched("")

    def _begin(self, model: nn.Module, deepspeed: bool) -> None:
        self.end()  # an error may have ended the last training
        existing = attached_to(model)
        if existing is not None and existing.owner is not None:  # attached by another callback whose training failed
            existing.owner.end()
            existing = None
        if deepspeed or existing is not None:
            self.session = existing.session if existing is not None else None
            self._tell(deepspeed)
            return
        self.session = attach(model, self.config)
        self._attached = attached_to(model)
        if self._attached is not None:  # None if the block is off
            self._attached.owner, self._attached.steps_are_marked = self, True

    def begin_batch(self) -> None:
        """Tell the session that the model is about to run.

        memplug observes only the model's `forward`, but a trainer may call another method.
        """
        if self._attached is not None:
            self._attached.begin_forward()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the session, since some trainers copy or pickle their callbacks."""
        return {**self.__dict__, "session": None, "launched": None, "_attached": None}

    def end_step(self) -> None:
        """Mark the end of a step: the optimizer has stepped."""
        if self._attached is not None:
            self._attached.step()

    def end(self) -> None:
        """Detach; the session stays available for `report()`."""
        attached, self._attached = self._attached, None
        if attached is not None:
            attached.owner = None
            attached.detach()

    def _tell(self, deepspeed: bool) -> None:
        if self._told or self.launched is not None:
            return
        self._told = True
        if self.session is None:
            log.warning(
                "memplug: off: under DeepSpeed the callback does nothing; put the block into DeepSpeed's JSON and call "
                "memplug.install() before the trainer is made"
            )
        elif deepspeed:
            log.info("memplug: under DeepSpeed the callback does nothing: the engine has its session")
        else:
            log.info("memplug: the model is attached already, and the callback leaves that session alone")
