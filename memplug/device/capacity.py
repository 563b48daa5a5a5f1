"""How much memory a training step may take of the device."""

from __future__ import annotations

from typing import Literal

from memplug.device.device import Device
from memplug.sizes import GIB, UNLIMITED_BYTES

DEVICE_SHARE = 0.92  # of the device's memory, that a plan may fill


def device_bytes(asked_gib: float | Literal["auto"], device: Device) -> int | None:
    """The most that a plan's step may have in use on the device; None: nothing was asked for on the CPU."""
    if device.memory is None:
        return None if asked_gib == "auto" else int(min(asked_gib * GIB, UNLIMITED_BYTES))
    return granted_bytes(asked_gib, device.memory.own_bytes)


def granted_bytes(asked_gib: float | Literal["auto"], own_bytes: float) -> int:
    """Returns what "device_budget_gib" grants of a device's memory: a share of it, or a number within it.

    Args:
        own_bytes: of the device, that other processes leave.
    """
    return int(own_bytes * DEVICE_SHARE if asked_gib == "auto" else min(asked_gib * GIB, own_bytes))
