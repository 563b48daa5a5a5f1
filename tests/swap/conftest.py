"""Skips tests of the swap list on a torch that does not report writes to tensors."""

import pytest

from memplug import native


@pytest.fixture(autouse=True)
def torch_reports_writes() -> None:
    """Skip the test if torch does not report writes."""
    if not native.load().StorageSwapper.is_possible():
        pytest.skip("a swap list needs torch 2.13")
