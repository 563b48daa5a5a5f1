"""`memplug show`: shows a recorded trace, a memory snapshot of torch's allocator, or a plan."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memplug.cli.output import AsJson, DeviceOfSnapshot, print_facts, progress, refuse_step_of_snapshot, refusing

if TYPE_CHECKING:
    from collections.abc import Callable

    from memplug.profile.trace import Trace

_STRETCHES_OF_A_PICTURE = 1600  # parts into which a PNG divides the clock: more than the axis has pixels


def show(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A recorded trace (.npz), a memory snapshot of torch's allocator, or a plan (.json)."
        ),
    ],
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the timeline, or the plan's map, as a page; needs plotly."),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the same as a PNG; needs kaleido and Chrome.")
    ] = None,
    snapshot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the trace as a snapshot for pytorch.org/memory_viz.")
    ] = None,
    chrome: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a Chrome trace (JSON), for example for ui.perfetto.dev.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Only this step of the trace, from 0.", min=0)] = None,
    device: DeviceOfSnapshot = None,
    as_json: AsJson = False,
) -> None:
    """Show a recorded trace (what ran, where memory peaks) or a plan (addresses, decisions). No GPU is used.

    Also shows the history in a memory snapshot of torch's allocator (torch.cuda.memory._dump_snapshot).

    Prints a summary; pages, pictures and files for other viewers are written only if an option names them.
    Exit code 0: all done; 1: the file cannot be read, or an output file cannot be written.
    """
    from memplug.plans.plan_file import is_plan
    from memplug.profile.allocator_history import is_snapshot

    paths = {"html": html, "png": png, "snapshot": snapshot, "chrome": chrome}
    with refusing():
        if is_plan(source):
            for option, value in {"snapshot": snapshot, "chrome": chrome, "step": step}.items():
                if value is not None:
                    raise typer.BadParameter(
                        "this option needs a trace, and the file is a plan", param_hint=f"--{option}"
                    )
            facts, rows, writers = _plan(source)
        elif is_snapshot(source):
            refuse_step_of_snapshot(step)
            facts, rows, writers = _snapshot(source, device)
        else:
            facts, rows, writers = _trace(source, step)
    print_facts(facts, rows, as_json=as_json)
    # A list, not a generator: if one view cannot be written, the others still are.
    if not all([_written(view, writers[view], path) for view, path in paths.items() if path is not None]):
        raise typer.Exit(1)


def _trace(source: Path, step: int | None) -> "tuple[dict, list[tuple[str, str]], dict[str, Callable[[Path], None]]]":
    """Return a trace's facts as plain values and in words, and the writers of its views."""
    from memplug.profile.trace import cut
    from memplug.profile.trace_file import load
    from memplug.show.summary import rows, summary

    trace = load(source)
    if step is not None:
        if step >= len(trace.steps):
            raise typer.BadParameter(f"the trace has {len(trace.steps)} steps", param_hint="--step")
        trace = cut(trace, step)
    facts = summary(trace)
    return facts, rows(facts), _views(trace)


def _snapshot(
    source: Path, device: int | None
) -> "tuple[dict, list[tuple[str, str]], dict[str, Callable[[Path], None]]]":
    """Return facts, words and writers, like `_trace`, for a snapshot of torch's allocator."""
    from memplug.profile.allocator_history import load
    from memplug.show.history_summary import rows, summary

    history = load(source, device)
    facts = summary(history)
    return facts, rows(facts), _views(history.trace)


def _views(trace: "Trace") -> "dict[str, Callable[[Path], None]]":
    """Return the function that writes each view of a trace, by the view's option."""
    from memplug.show.chrome import write_chrome
    from memplug.show.page import write_page
    from memplug.show.picture import write_picture
    from memplug.show.snapshot import write_snapshot
    from memplug.show.trace_figure import trace_figure

    return {
        "html": lambda path: write_page(trace_figure(trace), path),
        "png": lambda path: write_picture(trace_figure(trace, _STRETCHES_OF_A_PICTURE), path),
        "snapshot": partial(write_snapshot, trace),
        "chrome": partial(write_chrome, trace),
    }


def _plan(source: Path) -> "tuple[dict, list[tuple[str, str]], dict[str, Callable[[Path], None]]]":
    """Return facts, words and writers, like `_trace`, for a plan."""
    from memplug.plans.plan_file import load
    from memplug.show.page import write_page
    from memplug.show.picture import write_picture
    from memplug.show.plan_figure import plan_figure
    from memplug.show.plan_summary import rows, summary

    plan = load(source)
    facts = summary(plan)
    writers = {
        "html": lambda path: write_page(plan_figure(plan), path),
        "png": lambda path: write_picture(plan_figure(plan), path),
    }
    return facts, rows(facts), writers


def _written(view: str, write: "Callable[[Path], None]", path: Path) -> bool:
    """Write a view, and return whether that succeeded; if not, print the reason on stderr."""
    from memplug.errors import MemplugError

    try:
        with progress(f"writing {path}"):
            write(path)
    except (MemplugError, OSError) as error:
        problem = f"{path}: {error.strerror or error}" if isinstance(error, OSError) else str(error)
        typer.echo(f"--{view} was not written: {problem}", err=True)
        return False
    return True
