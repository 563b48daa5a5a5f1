"""The device that cases begin with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from memplug.predict.virtual import VirtualDevice
from tests.support.virtual_devices import SIMPLE


@pytest.fixture
def device() -> Iterator[VirtualDevice]:
    """Yield a device that copies 1 MB to the host in 1 s and back in 0.5 s, and reads 1 MB of its memory in 1 ms."""
    device = VirtualDevice(SIMPLE)
    device.restart()
    yield device
