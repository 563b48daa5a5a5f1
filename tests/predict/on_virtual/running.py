"""Files of cases, each run in a process of its own: torch has to learn of the virtual device before its first backward.

The process is forked from one that has imported the libraries, and calls `main`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.forking import launch_forked


def run_cases(cases: str, *options: str) -> None:
    """Runs `CASES_cases.py` of this folder, by pytest and with `options` of it.

    Raises:
        RuntimeError: a case failed; the message ends with what pytest wrote.
    """
    file = Path(__file__).with_name(f"{cases}_cases.py")
    launch_forked([__name__, file, *options], processes=1, module=True, time_limit_s=600)


def main() -> None:
    """Runs pytest on the file and the options of the command line, and ends the process."""
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
