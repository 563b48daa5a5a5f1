"""The estimators against the virtual device, which has to be a process's first device: in one of its own."""

from __future__ import annotations

import subprocess
import sys

from tests.support.folders import ROOT


def test_predictions_are_within_five_percent_of_a_step_and_ten_of_its_memory() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/support/on_virtual/tune_cases.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
