"""Commands of memplug that need the virtual device, each in a process of its own, which is forked: see
`tests.support.forking`. That a user's own process runs them as well is tested by `tests/cli`.
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
    """A command that has run.

    Attributes:
        exit_code: of its process.
        stdout, stderr: all that it wrote there.
    """

    exit_code: int
    stdout: str
    stderr: str


def run_command(folder: Path, words: Sequence[object]) -> Ended:
    """Runs `memplug WORDS`; `folder` is for what comes of it.

    Raises:
        RuntimeError: an exception that the command did not handle; the message ends with its traceback.
    """
    file = folder / "ended.json"
    launch_forked([__name__, file, *map(str, words)], processes=1, module=True)
    return Ended(**json.loads(file.read_text()))


def main() -> None:
    """Runs the command of the command line `FILE WORDS...`, and writes how it ended to the file."""
    done = CliRunner().invoke(app, sys.argv[2:], catch_exceptions=False)
    ended = Ended(exit_code=done.exit_code, stdout=done.stdout, stderr=done.stderr)
    Path(sys.argv[1]).write_text(json.dumps(asdict(ended)))
