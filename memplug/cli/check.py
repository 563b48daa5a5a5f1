"""`memplug check`: checks a configuration and says what memplug will do under it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memplug.cli.output import AsJson, collected_warnings, echo_warnings

if TYPE_CHECKING:
    from memplug.config import MemplugConfig


def check(
    ds_json: Annotated[
        Path | None,
        typer.Argument(
            metavar="DS_JSON", help='DeepSpeed JSON with a "memplug" block, or a file of Accelerate that names it.'
        ),
    ] = None,
    as_json: AsJson = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema for editors instead; needs no DS_JSON.")
    ] = False,
) -> None:
    """Check the "memplug" block of a DeepSpeed JSON and say what memplug will do; no GPU is used.

    Lists all problems at once. Warns of DeepSpeed settings that conflict or compete with memplug, and of syntax that
    DeepSpeed, Trainer or Accelerate cannot read.
    Exit code 0: usable; 1: not usable.
    """
    from memplug.cli import neighbours
    from memplug.config import json_schema, read_ds_config
    from memplug.ds_json.reading import read
    from memplug.errors import ConfigError

    if schema:
        typer.echo(json.dumps(json_schema(), indent=2))
        return
    if ds_json is None:
        raise typer.BadParameter("give a DeepSpeed JSON, or --schema", param_hint="DS_JSON")
    with collected_warnings() as warnings:
        try:
            found = read(ds_json)
            config = read_ds_config(found.content)
            neighbours.warn(found.content, config)
            facts, words = {"ok": True, "config": config.model_dump()}, "\n".join(_in_words(config))
            words += f"\n  read from        {found.path}" if found.path != ds_json else ""
            warnings += found.remarks
        except ConfigError as error:
            facts, words = {"ok": False, "problems": error.problems, "advice": error.advice}, str(error)
    if as_json:
        typer.echo(json.dumps({**facts, "warnings": warnings}, indent=2))
    else:
        typer.echo(words, err=not facts["ok"])
        echo_warnings(warnings)
    if not facts["ok"]:
        raise typer.Exit(1)


def _in_words(config: "MemplugConfig") -> list[str]:
    from memplug.show.techniques import pictures

    if not config.enabled:
        return ['memplug is off: the run is left untouched. Set "memplug": {"enabled": true} to switch it on.']
    techniques = pictures()
    served = any(each.serves and getattr(config, name).enabled for name, each in techniques.items())
    return [
        "memplug is on.",
        *(line for each in techniques.values() for line in each.block_words(config, served=served)),
        f"  device budget    {_budget_in_words(config.device_budget_gib, '92 % of the device')}",
        f"  host budget      {_budget_in_words(config.host_budget_gib, '80 % of the host, shared by its ranks')}",
        f"  metrics          {'to the monitor of DeepSpeed' if config.report.monitor else 'not sent to the monitor'}",
    ]


def _budget_in_words(budget_gib: float | str, auto: str) -> str:
    return f"{auto} (auto)" if budget_gib == "auto" else f"{budget_gib:g} GiB a rank"
