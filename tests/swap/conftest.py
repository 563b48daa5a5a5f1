"""These tests need a torch that says who writes to a tensor."""

import pytest

from memplug import native


@pytest.fixture(autouse=True)
def writes_are_told() -> None:
    """Skips them where it does not."""
    if not native.load().StorageSwapper.is_possible():
        pytest.skip("a swap list needs torch 2.13")
