"""Output of the commands: rows of a table, progress, and the warnings that memplug logged."""

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
DeviceOfSnapshot = Annotated[
    int | None,
    typer.Option(help="Device to read from a snapshot of several; by default the one with the most events.", min=0),
]


def refuse_step_of_snapshot(step: int | None) -> None:
    """Raise a usage error if --step is given for a snapshot."""
    if step is not None:
        raise typer.BadParameter(
            "a snapshot has no steps; without --step all of its history is used", param_hint="--step"
        )


def print_facts(facts: dict[str, Any], rows: list[tuple[str, str]], *, as_json: bool) -> None:
    """Print facts as one JSON object, or in words: a table on a terminal, otherwise plain lines for pasting.

    Args:
        facts: The JSON object.
        rows: The same facts in words, as (name, value).
        as_json: Whether to print `facts` rather than `rows`.
    """
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    if not sys.stdout.isatty():
        width = max(len(name) for name, _ in rows)
        typer.echo("\n".join(f"{name:{width}}  {value}" for name, value in rows))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False)
    for name, value in rows:
        table.add_row(name, Text(value, style="red" if name == "conflict" else ""))
    Console().print(table)


def print_table(headers: list[str], lines: list[list[str]]) -> None:
    """Print a table on a terminal, otherwise plain columns for pasting."""
    if not sys.stdout.isatty():
        widths = [max(map(len, column)) for column in zip(headers, *lines, strict=True)]
        for first, *rest in (headers, *lines):
            cells = [f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True)]
            typer.echo("  ".join([f"{first:{widths[0]}}", *cells]).rstrip())
        return
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for column, header in enumerate(headers):
        table.add_column(header, justify="right" if column else "left")
    for line in lines:
        table.add_row(*line)
    Console().print(table)


@contextmanager
def refusing() -> Iterator[None]:
    """If the `with` block raises a MemplugError, print it with its advice, and exit with code 1."""
    from memplug.errors import MemplugError

    try:
        yield
    except MemplugError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


@contextmanager
def progress(text: str, limit_s: float | None = None) -> Iterator[Callable[[str], None]]:
    """Show an activity on stderr: a spinner, or a bar if it has a time limit; one line if stderr is no terminal.

    Args:
        text: The activity.
        limit_s: Its time limit, if any.

    Yields:
        A function to call with a few words on the current part of the work.
    """
    if not sys.stderr.isatty():
        typer.echo(f"memplug: {text} ...", err=True)
        yield lambda doing: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
    from rich.progress_bar import ProgressBar

    class Elapsed(BarColumn):
        """A bar that shows the share of the time limit that has passed."""

        def render(self, task: Task) -> ProgressBar:
            """Return the bar."""
            return ProgressBar(total=limit_s, completed=min(task.elapsed or 0.0, limit_s), width=40)

    words = TextColumn("{task.description}")
    columns = (SpinnerColumn(), words) if limit_s is None else (words, Elapsed(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(text, total=None)
        yield lambda doing: shown.update(task, description=f"{text}: {doing}")


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Collect memplug's log messages, so that a command can show them once in its own output."""
    logger = logging.getLogger("memplug")
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


def echo_warnings(warnings: list[str]) -> None:
    """Print the warnings on stderr."""
    for warning in warnings:
        typer.echo(f"Warning: {warning}", err=True)
