"""The list of techniques; no other file of the session names one.

To add a technique that follows the program, add one entry here, at its place in the order in which techniques take
effect. Addresses come last: the arena plans for the requests that all other techniques leave.
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
"""The judge of each kind of plan part that a run can read."""


def reports(
    agreed: AgreedTechnique[Any] | None, followers: Iterable[Follower], why_off: Callable[[str], str]
) -> dict[str, TechniqueReport]:
    """Return the report of each technique by name.

    Args:
        agreed: the technique that ranks agree on; None if there is none.
        followers: the techniques that follow the program.
        why_off: called with a technique's name, returns why training goes on without it; "" if it may still start.
    """
    made = {each.technique.name: each.technique for each in followers}
    if agreed is not None:
        made[agreed.name] = agreed
    return {
        each.name: made[each.name].report() if each.name in made else each.report_type.absent(why_off(each.name))
        for each in (AGREED, *FOLLOWING)
    }
