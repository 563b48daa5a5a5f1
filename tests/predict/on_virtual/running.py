"""Runs files of cases, each in a process of its own, since torch must know the virtual device before any backward.

Each process is forked from a process that has imported the libraries, and calls `main`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.forking import launch_forked


def run_cases(cases: str, *options: str) -> None:
    """Run `CASES_cases.py` of this folder by pytest.

    Args:
        cases: names the file.
        *options: pytest's options.

    Raises:
        RuntimeError: a case failed; the message ends with pytest's output.
    """
    file = Path(__file__).with_name(f"{cases}_cases.py")
    launch_forked([__name__, file, *options], processes=1, module=True, time_limit_s=600)


def main() -> None:
    """Run pytest on the file and the options of the command line, and end the process."""
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
