"""These tests are collected where the simulated runtime is in front: with `-p tests.cudasim.plugin`."""

import os

import pytest

if "libcudasim" not in os.environ.get("LD_PRELOAD", ""):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def tiny_models_swap(keeps_nothing: None) -> None:
    """The device has room for all of them."""
