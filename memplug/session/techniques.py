"""The techniques, which no other file of the session names.

A new one that follows the program is one entry here, at its place in the order in which they take effect.
Addresses come last: they are for the requests that are left under all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from memplug.block import has_technique
from memplug.session.followers import Follower
from memplug.session.technique import AgreedTechnique, Technique
from memplug.session.technique_report import TechniqueReport
from memplug.tokenwise.technique import TokenWise

AGREED: type[AgreedTechnique[Any]] = TokenWise
FOLLOWING: tuple[type[Technique[Any]], ...] = ()

if has_technique("swap"):
    from memplug.swap.technique import SwapsWhole

    FOLLOWING += (SwapsWhole,)

if has_technique("arena"):
    from memplug.arena.technique import PlannedAddresses

    FOLLOWING += (PlannedAddresses,)

JUDGES = {each.part_type: each.mistakes_of for each in (AGREED, *FOLLOWING)}
"""The judge of each kind of part that a run reads."""


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
