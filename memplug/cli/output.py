"""How the commands print: rows of a table, progress, and the warnings that memplug logged."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def print_rows(rows: list[tuple[str, str]]) -> None:
    if not sys.stdout.isatty():
        # Plain and unwrapped, to be pasted.
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


@contextmanager
def progress(text: str) -> Iterator[None]:
    """Says on stderr what takes so long: a spinner on a terminal, one line elsewhere."""
    if not sys.stderr.isatty():
        typer.echo(f"memplug: {text} ...", err=True)
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Catches what memplug logs, so that a command can show it in its own output, once."""
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
    for warning in warnings:
        typer.echo(f"Warning: {warning}", err=True)


@contextmanager
def time_bar(text: str, limit_s: float) -> Iterator[Callable[[str], None]]:
    """Says on stderr what takes so long: on a terminal a bar that fills up to the time limit, one line elsewhere.

    Yields:
        Takes a few words on what is being done now.
    """
    if not sys.stderr.isatty():
        typer.echo(f"memplug: {text} ...", err=True)
        yield lambda doing: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, Task, TextColumn, TimeElapsedColumn
    from rich.progress_bar import ProgressBar

    class Elapsed(BarColumn):
        def render(self, task: Task) -> ProgressBar:
            return ProgressBar(total=limit_s, completed=min(task.elapsed or 0.0, limit_s), width=40)

    columns = (TextColumn("{task.description}"), Elapsed(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=None)
        yield lambda doing: bar.update(task, description=f"{text}: {doing}")
