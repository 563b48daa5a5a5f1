"""Runs an unchanged training script with memplug installed.

`deepspeed --module memplug.run train.py ...` or `torchrun --module memplug.run train.py ...`; for Megatron-LM's
scripts, `torchrun --module memplug.run pretrain_gpt.py ... --memplug-config ds.json`.
"""

from __future__ import annotations

import argparse
import logging
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import memplug
from memplug.config import load_config
from memplug.errors import ConfigError

OPTION = "--memplug-config"


def main(arguments: list[str] | None = None) -> None:
    """Install memplug, then run the script as Python would.

    Args:
        arguments: The launcher's options (such as `--local_rank=0`), the script, and the script's arguments; None:
            those of the command line. The script gets all of them except `--memplug-config FILE`. With this option
            memplug attaches to the training loop of Megatron-LM, by the "memplug" block of the JSON FILE. Without it,
            memplug attaches to DeepSpeed engines.

    Raises:
        ConfigError: No script was named, the script does not exist, or the block cannot be used.
        PatchError: `--memplug-config` was given, but Megatron-LM is not on the path or lacks a patched function.
    """
    arguments, config = _take_config(sys.argv[1:] if arguments is None else arguments)
    position = next((i for i, argument in enumerate(arguments) if not argument.startswith("-")), None)
    if position is None:
        raise ConfigError(["no script was named"], "Usage: deepspeed --module memplug.run train.py [its arguments]")
    script = Path(arguments[position])
    if not script.is_file():
        raise ConfigError([f"there is no script {script}"], "Name the training script after `memplug.run`.")
    logging.getLogger("memplug").addHandler(_Fallback())
    logging.getLogger("memplug").setLevel(logging.INFO)
    sys.argv = [str(script), *arguments[:position], *arguments[position + 1 :]]
    sys.path[0] = str(script.resolve().parent)
    if config is None:
        memplug.install()
    else:
        from memplug.hooks import megatron_training

        megatron_training.install(memplug.attach, load_config(config))
    runpy.run_path(str(script), run_name="__main__")


def _take_config(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the arguments without `--memplug-config`, and the value of that option.

    An option after `--` belongs to the script and is left alone.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(OPTION, dest="config", nargs="?", const="")
    known, rest = parser.parse_known_args(arguments)
    if known.config == "":
        raise ConfigError([f"{OPTION} names no file"], f"Usage: {OPTION} ds.json, a JSON with the block.")
    return rest, known.config


class _Fallback(logging.StreamHandler):
    """Shows memplug's log lines on stderr unless the script has set up logging."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line on rank 0, unless the root logger has handlers."""
        if not logging.getLogger().handlers and os.environ.get("RANK", "0") == "0":
            super().emit(record)


if __name__ == "__main__":
    main()
