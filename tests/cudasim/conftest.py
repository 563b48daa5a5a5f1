"""These tests are collected where the simulated runtime is in front: with `-p tests.cudasim.plugin`."""

import pytest

from tests.support.simulated import cuda_is_simulated

if not cuda_is_simulated():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def tiny_models_swap(keeps_nothing: None) -> None:
    """The device has room for all of them."""
