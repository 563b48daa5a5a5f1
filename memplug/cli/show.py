"""`memplug show`: what a recorded trace, or a plan, says."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memplug.cli.output import AsJson, print_rows, progress

if TYPE_CHECKING:
    from memplug.profile.trace import Trace


def show(
    trace_file: Annotated[Path, typer.Argument(metavar="TRACE", help="A recorded trace (.npz).")],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write the memory timeline as a page; needs plotly.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Write it as a picture; needs matplotlib.")
    ] = None,
    snapshot: Annotated[
        Path | None, typer.Option("--snapshot", metavar="FILE", help="Write a file for pytorch.org/memory_viz.")
    ] = None,
    chrome: Annotated[
        Path | None,
        typer.Option("--chrome", metavar="FILE", help="Write a Chrome trace (JSON), for example for ui.perfetto.dev."),
    ] = None,
    step: Annotated[int | None, typer.Option("--step", help="Only this step of the trace, from 0.", min=0)] = None,
    as_json: AsJson = False,
) -> None:
    """Show a recorded trace: what ran, what memory it asked for, where that peaks; no GPU is used.

    Prints a summary; pages, pictures and files for other viewers are written only where an option names them.
    Exit code 0: all done; 1: the trace, or one of the files, is not usable.
    """
    from memplug.errors import TraceError
    from memplug.profile.trace import cut
    from memplug.profile.trace_file import load
    from memplug.show.summary import rows, summary

    try:
        trace = load(trace_file)
    except TraceError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    if step is not None:
        if step >= len(trace.steps):
            raise typer.BadParameter(f"the trace has {len(trace.steps)} steps", param_hint="--step")
        trace = cut(trace, step)
    facts = summary(trace)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        print_rows(rows(facts))
    if not _write_views(trace, html=html, png=png, snapshot=snapshot, chrome=chrome):
        raise typer.Exit(1)


def _write_views(trace: "Trace", **paths: Path | None) -> bool:
    """Writes every view that has a path, and says on stderr which could not be; False: not all could."""
    from memplug.errors import MemplugError
    from memplug.show.chrome import write_chrome
    from memplug.show.page import write_page
    from memplug.show.picture import write_picture
    from memplug.show.snapshot import write_snapshot

    writers = {"html": write_page, "png": write_picture, "snapshot": write_snapshot, "chrome": write_chrome}
    written = True
    for view, path in paths.items():
        if path is None:
            continue
        try:
            with progress(f"writing {path}"):
                writers[view](trace, path)
        except (MemplugError, OSError) as error:
            problem = f"{path}: {error.strerror or error}" if isinstance(error, OSError) else str(error)
            typer.echo(f"--{view} was not written: {problem}", err=True)
            written = False
    return written
