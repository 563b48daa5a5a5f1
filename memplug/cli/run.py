"""`memplug run`: starts a command, with memplug in each Python process that it starts."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from memplug.cli.output import refusing

_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def run(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="The command, with its own arguments.")],
    config: Annotated[
        Path | None,
        typer.Option(help="A block, or a JSON that holds one, for training whose own configuration has none."),
    ] = None,
) -> None:
    """Start a training command, with memplug in each Python process that it starts.

    memplug attaches to each DeepSpeed engine whose configuration has a "memplug" block. With --config it also attaches
    to engines without one, to the models of Megatron-LM's training loop, and in the Trainers of transformers and
    Lightning. Other processes run as without memplug.
    Exit code: the command's; 128 and more if a signal ended it; 127: there is no such command; 1: the block is not
    usable.
    """
    from memplug.config import block_in
    from memplug.startup.outcome import Outcome
    from memplug.startup.path_entry import sitecustomize
    from memplug.startup.settings import RunSettings

    with refusing():
        if config is not None:
            block_in(config)
        program = _program(command)
    with tempfile.TemporaryDirectory(prefix="memplug_run_", ignore_cleanup_errors=True) as notes:
        folder = str(Path(sitecustomize.__file__).parent)
        before = os.environ.get("PYTHONPATH")
        others = before.split(os.pathsep) if before else []  # an empty one among others is the current folder
        path = [folder, *(each for each in others if each != folder)]
        settings = RunSettings(None if config is None else config.resolve(), Path(notes))
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), sitecustomize.VARIABLE: settings.text()}
        status = _wait(program, env)
        outcome = Outcome(Path(notes))
        outcome.read()
    why = outcome.explain()
    if status == 0 and why is not None:
        typer.echo(why, err=True)
    raise typer.Exit(status)


def _program(command: list[str]) -> list[str]:
    """Return the command to start; a Python script runs under this Python.

    Raises:
        typer.Exit: there is no such command.
    """
    if command[0].endswith(".py") and Path(command[0]).is_file():
        return [sys.executable, *command]
    if shutil.which(command[0]) is None:
        typer.echo(f"memplug run: there is no command {command[0]}", err=True)
        raise typer.Exit(127)
    return command


def _wait(program: list[str], env: dict[str, str]) -> int:
    """Run the program to its end, pass signals on to it, and return its exit code.

    If a terminal interrupts this process, it interrupts the program too; so that interrupt is not passed on.
    """
    process = subprocess.Popen(program, env=env)

    def forward(number: int, frame: object) -> None:
        if number != signal.SIGINT or not _in_foreground():
            process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (*_FORWARDED, signal.SIGINT)}
    try:
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status


def _in_foreground() -> bool:
    """Return whether this process belongs to the group that its terminal sends interrupts to."""
    try:
        with open("/dev/tty") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False
