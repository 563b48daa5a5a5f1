"""`memplug diff`: compares two plans."""

from pathlib import Path
from typing import Annotated

import typer

from memplug.cli.output import AsJson, print_facts, refusing


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A plan, from `memplug plan -o` or from a training run.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another plan.")],
    as_json: AsJson = False,
) -> None:
    """Compare two plans: heights, programs, which requests are new, resized or moved, and which decisions changed.

    Exit code 0: compared, with or without differences; 1: a plan is not usable.
    """
    from memplug.plans.plan_file import load
    from memplug.show import plan_diff

    with refusing():
        facts = plan_diff.diff(load(a), load(b))
    print_facts(facts, plan_diff.rows(facts), as_json=as_json)
