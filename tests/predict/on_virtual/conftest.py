"""The device that cases begin with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from memplug.predict.virtual import VirtualDevice
from tests.support.virtual_devices import SIMPLE


@pytest.fixture
def device() -> Iterator[VirtualDevice]:
    """Yield a device: a megabyte takes a second to the host, half a second back, and a millisecond to be read."""
    device = VirtualDevice(SIMPLE)
    device.restart()
    yield device
