"""`memplug diff`: what two plans have in common."""

import json
from pathlib import Path
from typing import Annotated

import typer

from memplug.cli.output import AsJson, print_rows


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A plan, of `memplug plan -o` or of a training.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    as_json: AsJson = False,
) -> None:
    """Compare two plans: heights, programs, which requests are new, resized or moved, and which decisions changed.

    Exit code 0: compared, whatever differs; 1: a plan is not usable.
    """
    from memplug.errors import MemplugError
    from memplug.plan.plan_file import load
    from memplug.show import plan_diff

    try:
        facts = plan_diff.diff(load(a), load(b))
    except MemplugError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        print_rows(plan_diff.rows(facts))
