"""These tests are collected where the simulated runtime is in front: with `-p tests.cudasim.plugin`."""

import os

if "libcudasim" not in os.environ.get("LD_PRELOAD", ""):
    collect_ignore_glob = ["test_*.py"]
