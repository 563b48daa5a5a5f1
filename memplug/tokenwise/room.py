"""Notices that the device has less room than a plan was given: another process took memory, or fragments did."""

from __future__ import annotations

from collections.abc import Callable

from memplug.config import MemplugConfig
from memplug.device.device import Device
from memplug.plan.decisions import Decisions
from memplug.stages.ranks import Ranks
from memplug.tokenwise import budgets


class Room:
    """Called at the end of the same steps on all ranks. The device's allocator tells when it had to empty its cache."""

    def __init__(self, config: MemplugConfig, device: Device, ranks: Ranks):
        self._config, self._device, self._ranks = config, device, ranks
        self._retries = 0
        self._agreed: Callable[[], float] | None = None

    def is_short(self, decisions: Decisions | None) -> bool:
        """A step ran by `decisions`: whether that of a rank, in the step before this one, keeps more than there is room
        for. None: no plan was made for the step.
        """
        if self._device.memory is None:
            return False
        before, self._retries = self._retries, budgets.allocation_retries(self._device)
        agreed, self._agreed = self._agreed, None
        if decisions is None:
            return False
        self._agreed = self._ranks.least(0.0 if self._retries > before and self._lacks(decisions) else 1.0)
        return agreed is not None and agreed() < 1.0

    def _lacks(self, decisions: Decisions) -> bool:
        if decisions.peak_bytes is None:
            return False
        kept_bytes = decisions.solution.device_bytes
        return budgets.device_room_bytes(self._config, self._device, decisions.peak_bytes - kept_bytes) < kept_bytes
