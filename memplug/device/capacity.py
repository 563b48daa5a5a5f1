"""The amount of device memory that a training step may use."""

from __future__ import annotations

from typing import Literal

from memplug.device.device import Device
from memplug.sizes import GIB, UNLIMITED_BYTES

DEVICE_SHARE = 0.92  # share of the device's memory that a plan may fill


def device_bytes(asked_gib: float | Literal["auto"], device: Device) -> int | None:
    """Return the most bytes that a planned step may use on the device; None on the CPU if the block sets no budget.

    Args:
        asked_gib: "device_budget_gib" of the block.
        device: the device that trains.
    """
    if device.memory is None:
        return None if asked_gib == "auto" else int(min(asked_gib * GIB, UNLIMITED_BYTES))
    return granted_bytes(asked_gib, device.memory.own_bytes)


def granted_bytes(asked_gib: float | Literal["auto"], own_bytes: float) -> int:
    """Return the bytes of a device's memory that "device_budget_gib" grants.

    "auto" grants `DEVICE_SHARE` of the memory. A number grants that many GiB, at most all of the memory.

    Args:
        asked_gib: "device_budget_gib" of the block.
        own_bytes: the device's memory that other processes do not hold.
    """
    return int(own_bytes * DEVICE_SHARE if asked_gib == "auto" else min(asked_gib * GIB, own_bytes))
