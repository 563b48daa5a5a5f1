"""Runs memplug's commands that need the virtual device, each in a forked process (`tests.support.forking`).

`tests/cli` tests that a user's own process runs them as well.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from typer.testing import CliRunner

from memplug.cli import app
from tests.support.forking import launch_forked


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """The result of a command.

    Attributes:
        exit_code: the exit code of the command's process.
        stdout: the text that the command wrote to stdout.
        stderr: the text that the command wrote to stderr.
    """

    exit_code: int
    stdout: str
    stderr: str


def run_command(folder: Path, words: Sequence[object]) -> Ended:
    """Run `memplug WORDS`.

    Args:
        folder: gets the result's file.
        words: the command line.

    Raises:
        RuntimeError: an exception that the command did not handle; the message ends with its traceback.
    """
    file = folder / "ended.json"
    launch_forked([__name__, file, *map(str, words)], processes=1, module=True)
    return Ended(**json.loads(file.read_text()))


def main() -> None:
    """Run `memplug WORDS...`, and write the result to `FILE`; this process's arguments are `FILE WORDS...`."""
    done = CliRunner().invoke(app, sys.argv[2:], catch_exceptions=False)
    ended = Ended(exit_code=done.exit_code, stdout=done.stdout, stderr=done.stderr)
    Path(sys.argv[1]).write_text(json.dumps(asdict(ended)))
