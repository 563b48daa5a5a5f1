"""The techniques, which no other file of the session names.

A new one that follows the program is one entry here, at its place in the order in which they take effect.
Addresses come last: they are for the requests that are left under all others.
"""

from __future__ import annotations

from typing import Any

from memplug.block import has_technique
from memplug.session.technique import AgreedTechnique, Technique
from memplug.tokenwise.technique import TokenWise

AGREED: type[AgreedTechnique[Any]] = TokenWise
FOLLOWING: tuple[type[Technique[Any]], ...] = ()

if has_technique("swap"):
    from memplug.swap.technique import SwapsWhole

    FOLLOWING += (SwapsWhole,)

if has_technique("arena"):
    from memplug.arena.technique import PlannedAddresses

    FOLLOWING += (PlannedAddresses,)
