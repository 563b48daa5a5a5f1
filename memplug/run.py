"""Runs an unchanged training script with memplug installed.

`deepspeed --module memplug.run train.py ...`, `torchrun --module memplug.run train.py ...`.
"""

from __future__ import annotations

import logging
import os
import runpy
import sys
from pathlib import Path

from memplug.errors import ConfigError


def main(arguments: list[str] | None = None) -> None:
    """Install memplug, then run the script as Python would.

    Args:
        arguments: options that the launcher puts first (`--local_rank=0`; handed on to the script), the script, and
            its own arguments.

    Raises:
        ConfigError: no script was named, or it does not exist.
    """
    import memplug

    arguments = sys.argv[1:] if arguments is None else arguments
    position = next((i for i, argument in enumerate(arguments) if not argument.startswith("-")), None)
    if position is None:
        raise ConfigError(["no script was named"], "Usage: deepspeed --module memplug.run train.py [its arguments]")
    script = Path(arguments[position])
    if not script.is_file():
        raise ConfigError([f"there is no script {script}"], "Name the training script after `memplug.run`.")
    memplug.install()
    logging.getLogger("memplug").addHandler(_Fallback())
    logging.getLogger("memplug").setLevel(logging.INFO)
    sys.argv = [str(script), *arguments[:position], *arguments[position + 1 :]]
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")


class _Fallback(logging.StreamHandler):
    """Shows memplug's lines on stderr as long as the script has set up no logging of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        """On the first rank only, as every line of memplug's."""
        if not logging.getLogger().handlers and os.environ.get("RANK", "0") == "0":
            super().emit(record)


if __name__ == "__main__":
    main()
