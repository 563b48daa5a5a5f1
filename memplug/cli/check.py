"""`memplug check`: what a configuration will do."""

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
            metavar="DS_JSON", help='DeepSpeed JSON with a "memplug" block, or Accelerate\'s file naming it.'
        ),
    ] = None,
    as_json: AsJson = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema for editors instead; needs no DS_JSON.")
    ] = False,
) -> None:
    """Check the "memplug" block of a DeepSpeed JSON and say what memplug will do; no GPU is used.

    All problems are listed at once; settings of DeepSpeed that conflict or compete with memplug are warnings, and so is
    what Trainer and Accelerate, or DeepSpeed, would not read.
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
    if not config.enabled:
        return ['memplug is off: the run is left untouched. Set "memplug": {"enabled": true} to switch it on.']
    lines, tokenwise, arena = ["memplug is on."], config.tokenwise, config.arena
    if tokenwise.enabled:
        regions = "every decoder layer" if tokenwise.regions == "auto" else ", ".join(tokenwise.regions)
        moving = f"{tokenwise.buffers} regions' tensors at a time are on their way; memory to prefetch into is "
        reserved = "planned with the arena" if arena.enabled else "reserved before the first step under a plan"
        lines += [
            f"  rows swapped     {_alpha_in_words(tokenwise.alpha)}",
            f"  regions          {regions}",
            f"  smallest swap    tensors of {tokenwise.min_offload_bytes:,} bytes",
            f"  buffers          {moving}{reserved}",
        ]
    else:
        lines.append("  row-cached recompute is switched off (tokenwise.enabled): nothing is swapped or recomputed")
    if arena.enabled:
        checked = ", with freed memory and what surrounds each block looked after: slow" if arena.checks else ""
        lines.append(f"  arena            training is served at planned addresses (planner {arena.planner}){checked}")
        lines.append(f"  plans            {f'kept in {config.plan_dir}' if config.plan_dir else 'not kept'}")
    else:
        lines.append("  the planned arena is switched off (arena.enabled): torch's own allocator serves")
    return [
        *lines,
        f"  device budget    {_budget_in_words(config.device_budget_gib, '92 % of the device')}",
        f"  host budget      {_budget_in_words(config.host_budget_gib, '80 % of the host, shared by its ranks')}",
        f"  metrics          {'to the monitor of DeepSpeed' if config.report.monitor else 'not sent to the monitor'}",
    ]


def _alpha_in_words(alpha: float | str) -> str:
    if alpha == "auto":
        return "chosen per tensor from measured rates and the budgets (alpha auto)"
    if alpha == "memo":
        return "one fraction of each captured tensor, as much as each region's forward hides (alpha memo)"
    if alpha == 0:
        return "none: all of each captured tensor is recomputed (alpha 0)"
    if alpha == 1:
        return "all of each captured tensor, nothing expensive is recomputed (alpha 1)"
    return f"the first {alpha:.4g} of each captured tensor's rows, the rest recomputed (alpha {alpha:.4g})"


def _budget_in_words(budget_gib: float | str, auto: str) -> str:
    return f"{auto} (auto)" if budget_gib == "auto" else f"{budget_gib:g} GiB a rank"
