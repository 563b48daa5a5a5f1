"""The `memplug` command: what a configuration will do, what this machine can do, and what a recorded trace shows."""

import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from memplug.config import MemplugConfig
    from memplug.profile.trace import Trace

app = typer.Typer(
    help="Training memory as cheap as the hardware allows: a plugin for DeepSpeed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]

_PACKAGES = ("torch", "deepspeed", "transformers", "megatron-core", "transformer-engine", "flash-attn")

# Settings of others that take away what memplug builds on: variable, pattern in its value, what it does.
_CONFLICTS = (
    *(
        (variable, pattern, effect)
        for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        for pattern, effect in (
            (
                r"\bbackend\s*:\s*cudaMallocAsync\b",
                "replaces torch's caching allocator, whose statistics memplug reports and budgets by: remove it",
            ),
            (
                r"\bpinned_use_cuda_host_register\s*:\s*True\b",
                "torch pins host memory of its own this way: leave room for it with host_budget_gib, or remove it",
            ),
        )
    ),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", r"\S", "every free waits for the device, so no copy overlaps compute: unset it"),
    ("CUDA_LAUNCH_BLOCKING", r"^\s*[1-9]", "every launch waits for the device, so no copy overlaps compute: unset it"),
)


def main() -> None:
    """Entry point of the `memplug` command."""
    app()


@app.command(epilog="Example: memplug check ds_config.json")
def check(
    ds_json: Annotated[
        Path | None, typer.Argument(metavar="DS_JSON", help='DeepSpeed JSON with a "memplug" block.')
    ] = None,
    as_json: AsJson = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema for editors instead; needs no DS_JSON.")
    ] = False,
) -> None:
    """Check the "memplug" block of a DeepSpeed JSON and say what memplug will do; no GPU is used.

    All problems are listed at once. Exit code 0: usable; 1: not usable.
    """
    from memplug.config import json_schema, load_config
    from memplug.errors import ConfigError

    if schema:
        typer.echo(json.dumps(json_schema(), indent=2))
        return
    if ds_json is None:
        raise typer.BadParameter("give a DeepSpeed JSON, or --schema", param_hint="DS_JSON")
    with _collected_warnings() as warnings:
        try:
            config = load_config(ds_json)
        except ConfigError as error:
            if as_json:
                failed = {"ok": False, "problems": error.problems, "advice": error.advice, "warnings": warnings}
                typer.echo(json.dumps(failed, indent=2))
            else:
                typer.echo(str(error), err=True)
                _echo_warnings(warnings)
            raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps({"ok": True, "config": config.model_dump(), "warnings": warnings}, indent=2))
        return
    typer.echo("\n".join(_in_words(config)))
    _echo_warnings(warnings)


@app.command(epilog="Example: memplug doctor > doctor.txt, to paste into a bug report")
def doctor(as_json: AsJson = False) -> None:
    """Show what memplug finds on this machine: versions, compiler, device, measured rates, settings in the way.

    Builds the native core where that was not done yet.
    """
    facts = {"versions": _versions(), "compiler": _compiler()}
    with _progress("building the native core, where that was not done yet (half a minute)"):
        facts["native_core"] = _native_core()
    with _progress("importing torch and measuring the device (a few seconds)"):
        facts["hardware"] = _hardware()
    facts["conflicts"] = _conflicts(os.environ)
    facts["missing"] = [package for package in ("torch", "deepspeed") if facts["versions"][package] == "absent"]
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        _print_rows(_doctor_rows(facts))
    if facts["missing"] or facts["conflicts"]:
        raise typer.Exit(1)


@app.command(epilog="Example: memplug show trace.npz --html memory.html")
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
        _print_rows(rows(facts))
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
            with _progress(f"writing {path}"):
                writers[view](trace, path)
        except (MemplugError, OSError) as error:
            problem = f"{path}: {error.strerror or error}" if isinstance(error, OSError) else str(error)
            typer.echo(f"--{view} was not written: {problem}", err=True)
            written = False
    return written


def _in_words(config: "MemplugConfig") -> list[str]:
    if not config.enabled:
        return ['memplug is off: the run is left untouched. Set "memplug": {"enabled": true} to switch it on.']
    lines = ["memplug is on."]
    tokenwise = config.tokenwise
    if tokenwise.enabled:
        lines += [
            f"  rows swapped     {_alpha_in_words(tokenwise.alpha)}",
            "  regions          "
            + ("every decoder layer" if tokenwise.regions == "auto" else ", ".join(tokenwise.regions)),
            f"  smallest swap    tensors of {tokenwise.min_offload_bytes:,} bytes",
        ]
    else:
        lines.append("  row-cached recompute is switched off (tokenwise.enabled): nothing is swapped or recomputed")
    lines += [
        f"  device budget    {_budget_in_words(config.device_budget_gib, '92 % of the device')}",
        f"  host budget      {_budget_in_words(config.host_budget_gib, '80 % of the host, shared by its ranks')}",
        f"  metrics          {'to the monitor of DeepSpeed' if config.report.monitor else 'not sent to the monitor'}",
    ]
    return lines


def _alpha_in_words(alpha: float | str) -> str:
    if alpha == "auto":
        return "chosen per tensor from measured rates and the budgets (alpha auto)"
    if alpha == 0:
        return "none: all of each captured tensor is recomputed (alpha 0)"
    if alpha == 1:
        return "all of each captured tensor, nothing expensive is recomputed (alpha 1)"
    return f"the first {alpha:.4g} of each captured tensor's rows, the rest recomputed (alpha {alpha:.4g})"


def _budget_in_words(budget_gib: float | str, auto: str) -> str:
    return f"{auto} (auto)" if budget_gib == "auto" else f"{budget_gib:g} GiB a rank"


def _versions() -> dict[str, str]:
    # Read from the installed metadata: importing some of these takes seconds, prints, or fails without a GPU.
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": sys.version.split()[0]}
    for package in ("memplug", *_PACKAGES):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def _compiler() -> str:
    import shlex
    import shutil
    import subprocess

    # What torch.utils.cpp_extension would call.
    command = shlex.split(os.environ.get("CXX", "c++"))
    if not command or shutil.which(command[0]) is None:
        return "absent"
    answer = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=30)
    lines = answer.stdout.splitlines()
    return lines[0] if answer.returncode == 0 and lines else f"`{shlex.join(command)} --version` failed"


def _native_core() -> dict[str, object]:
    from memplug import native
    from memplug.errors import NativeError

    try:
        native.load()
    except NativeError as error:
        return {"ready": False, "problem": error.problem, "advice": error.advice}
    return {"ready": True, "folder": str(native.build_folder())}


def _hardware() -> dict[str, object]:
    from dataclasses import asdict

    import torch

    from memplug.profile.hardware import measure

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return {"device": str(device), **asdict(measure(device))}


def _conflicts(environment: Mapping[str, str]) -> list[dict[str, str]]:
    return [
        {"setting": f"{variable}={environment[variable]}", "effect": effect}
        for variable, pattern, effect in _CONFLICTS
        if re.search(pattern, environment.get(variable, ""))
    ]


def _doctor_rows(facts: dict) -> list[tuple[str, str]]:
    hardware = facts["hardware"]
    limit = hardware["memlock_limit_bytes"]
    core = facts["native_core"]
    rows = [*facts["versions"].items(), ("C++ compiler", facts["compiler"])]
    rows.append(("native core", f"built, in {core['folder']}" if core["ready"] else f"absent: {core['problem']}"))
    rows += [
        ("device", f"{hardware['device']}: {hardware['device_name']}"),
        ("device memory", f"{_gib(hardware['device_free_bytes'])} free of {_gib(hardware['device_total_bytes'])}"),
        ("host memory", f"{_gib(hardware['host_available_bytes'])} available"),
        ("device to host", f"{hardware['d2h_bytes_per_s'] / 1e9:.1f} GB/s, both directions running"),
        ("host to device", f"{hardware['h2d_bytes_per_s'] / 1e9:.1f} GB/s, both directions running"),
        ("pinned allocation", f"{hardware['pinned_alloc_bytes_per_s'] / 1e9:.2f} GB/s"),
        ("matmul", f"{hardware['matmul_flops_per_s'] / 1e12:.2f} TFLOP/s"),
        ("memlock limit", "none" if limit is None else f"{limit / 2**20:,.0f} MiB"),
    ]
    conflicts = [("conflict", f"{conflict['setting']}: {conflict['effect']}") for conflict in facts["conflicts"]]
    return [*rows, *(conflicts or [("conflicts", "none")]), ("ready", _verdict(facts))]


def _verdict(facts: dict) -> str:
    if facts["missing"]:
        return f"no: {' and '.join(facts['missing'])} not installed"
    if facts["conflicts"]:
        return "no: see the conflicts above"
    verdict = "yes" if facts["hardware"]["device"].startswith("cuda") else "yes, on the CPU: torch sees no CUDA device"
    core = facts["native_core"]
    return verdict if core["ready"] else f"{verdict}; without the profiler. {core['advice']}"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"


def _print_rows(rows: list[tuple[str, str]]) -> None:
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
def _progress(text: str) -> Iterator[None]:
    """Says on stderr what takes so long: a spinner on a terminal, one line elsewhere."""
    if not sys.stderr.isatty():
        typer.echo(f"memplug: {text} ...", err=True)
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


@contextmanager
def _collected_warnings() -> Iterator[list[str]]:
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


def _echo_warnings(warnings: list[str]) -> None:
    for warning in warnings:
        typer.echo(f"Warning: {warning}", err=True)
