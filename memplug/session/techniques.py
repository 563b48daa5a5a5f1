"""The techniques: a new one that follows the program is one entry here, at the place at which it takes effect.

Addresses come last: they are for the requests that are left under all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from memplug.arena.technique import PlannedAddresses
from memplug.session.followers import Follower
from memplug.session.technique import AgreedTechnique, Technique
from memplug.session.technique_report import TechniqueReport
from memplug.swap.technique import SwapsWhole
from memplug.tokenwise.technique import TokenWise

AGREED: type[AgreedTechnique[Any]] = TokenWise
FOLLOWING: tuple[type[Technique[Any]], ...] = (SwapsWhole, PlannedAddresses)

JUDGES = {each.part_type: each.mistakes_of for each in (TokenWise, *FOLLOWING)}
"""Of all parts of a plan that a run reads."""

def reports(
    agreed: AgreedTechnique[Any] | None, followers: Iterable[Follower], why_off: Callable[[str], str]
) -> dict[str, TechniqueReport]:
    """Returns the report of each technique by name.

    Args:
        agreed: None: there is none.
        why_off: says of a technique's name why training goes on without it; "": there may be one later.
    """
    made = {each.technique.name: each.technique for each in followers}
    if agreed is not None:
        made[agreed.name] = agreed
    return {
        each.name: made[each.name].report() if each.name in made else each.report_type.absent(why_off(each.name))
        for each in (AGREED, *FOLLOWING)
    }
