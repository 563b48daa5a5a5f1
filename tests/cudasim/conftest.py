"""Collects these tests only where the simulated runtime is loaded: with `-p tests.cudasim.plugin`."""

import pytest

from tests.support.simulated import cuda_is_simulated

if not cuda_is_simulated():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def tiny_models_swap(keeps_nothing: None) -> None:
    """Make tiny models swap, although the device has space for all of their tensors."""
