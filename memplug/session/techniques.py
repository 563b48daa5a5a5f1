"""The techniques that follow the program, in the order in which they take effect: a new one is one entry here.

Addresses come last: they are for the requests that are left under all others.
"""

from __future__ import annotations

from typing import Any

from memplug.arena.technique import PlannedAddresses
from memplug.session.technique import Technique
from memplug.swap.technique import SwapsWhole
from memplug.tokenwise.technique import TokenWise

FOLLOWING: tuple[type[Technique[Any]], ...] = (SwapsWhole, PlannedAddresses)

JUDGES = {each.part_type: each.mistakes_of for each in (TokenWise, *FOLLOWING)}
"""The judge of each kind of part that a run reads."""
