"""Runs an unchanged training script with memplug installed, in this process.

`python -m memplug.run [--config FILE] train.py ...`, or `-m package.train ...` for a module; with a launcher,
`torchrun --module memplug.run train.py ...`. `memplug run COMMAND` instead puts memplug into each process of a command.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import logging
import os
import runpy
import sys
from pathlib import Path
from typing import NamedTuple

from memplug.config import block_in
from memplug.errors import ConfigError
from memplug.integrations import launched
from memplug.startup.outcome import Outcome
from memplug.startup.path_entry.sitecustomize import MODULES, VARIABLE, Imports
from memplug.startup.settings import RunSettings

OPTION = "--memplug-config"
_USAGE = "Usage: python -m memplug.run [--config FILE] train.py [its arguments], or -m package.train for a module."

log = logging.getLogger("memplug")


class _Line(NamedTuple):
    """A parsed command line.

    Attributes:
        config: the file of `--config` or `--memplug-config`; None without one.
        is_module: True after `-m`.
        target: the script, or the module's name.
        arguments: the script's arguments: those that the launcher put first, then those of the user.
    """

    config: str | None
    is_module: bool
    target: str
    arguments: list[str]


def main(arguments: list[str] | None = None) -> None:
    """Install memplug, then run the script or module as Python would.

    memplug attaches to each DeepSpeed engine whose configuration has a "memplug" block, and with `--config FILE` also
    to engines without one, to the models of Megatron-LM's training loop, and in Trainers of transformers and Lightning.

    Args:
        arguments: memplug's options, options that the launcher puts first (`--local_rank=0`; passed on to the script),
            the script or `-m` and a module, and the script's own arguments. None for the arguments of this process.
            FILE is a block, or a JSON that holds one. `--memplug-config FILE` means the same as `--config FILE`, and
            may also stand among the script's own arguments, from which memplug removes it; after `--` it belongs to
            the script.

    Raises:
        ConfigError: no script was named, the script or module does not exist, or the block cannot be used.
    """
    line = _parse(sys.argv[1:] if arguments is None else arguments)
    config = None if line.config is None else block_in(line.config)
    if line.is_module:
        if not _is_module(line.target):
            raise ConfigError([f"there is no module {line.target}"], "Name a module that Python can import after `-m`.")
    elif not Path(line.target).is_file():
        raise ConfigError([f"there is no script {line.target}"], "Name the training script after `memplug.run`.")
    outer = os.environ.get(VARIABLE)  # set by `memplug run`, which then explains the outcome of all processes
    outcome = Outcome(RunSettings.read(outer).notes if outer else None)
    install = functools.partial(launched.install, config=config, outcome=outcome)
    sys.meta_path.insert(0, Imports(install))
    for name in MODULES:
        if name in sys.modules:
            install(name)
    sys.argv = [line.target, *line.arguments]
    try:
        if line.is_module:
            runpy.run_module(line.target, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(line.target).resolve().parent)
            runpy.run_path(line.target, run_name="__main__")
    except SystemExit as exit_:
        if not exit_.code:
            _explain(outcome)
        raise
    _explain(outcome)


def _explain(outcome: Outcome) -> None:
    why = outcome.explain() if outcome.folder is None else None
    if why is not None:
        launched.show_log()
        log.warning(why)


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


def _parse(arguments: list[str]) -> _Line:
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    options.add_argument(OPTION, dest="config", nargs="?", const="")
    found, rest = options.parse_known_args(arguments)
    config, first = found.config, []
    while rest and rest[0].startswith("-"):
        option, *rest = rest
        name, is_joined, value = option.partition("=")
        if name == "--config":
            config = value if is_joined else rest.pop(0) if rest else ""
        elif name == "-m":
            if not rest:
                raise ConfigError(["no module was named after `-m`"], _USAGE)
            return _Line(_named(config), True, rest[0], [*first, *rest[1:]])
        else:
            first.append(option)
    if not rest:
        raise ConfigError(["no script was named"], _USAGE)
    return _Line(_named(config), False, rest[0], [*first, *rest[1:]])


def _named(config: str | None) -> str | None:
    if config == "":
        raise ConfigError(["--config names no file"], "Usage: --config FILE, a block or a JSON that holds one.")
    return config


if __name__ == "__main__":
    main()
