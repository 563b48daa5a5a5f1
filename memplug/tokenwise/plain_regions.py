"""Out of the way: the module of a plain region has its own class back, and runs as if memplug were not there.

The first region of each kind keeps memplug's class. It begins the step's program, and sees the size of its arguments:
where they are larger than in the step that the plan was made from, all regions are back at once, before the others run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from memplug.errors import coded
from memplug.tokenwise.engine.region import Region
from memplug.tokenwise.plan.decisions import Decisions

log = logging.getLogger("memplug")


class RegionModule(Protocol):
    """The module of a region; see `memplug.hooks.regions`."""

    def leave(self) -> bool:
        """Give the module its own class; False, and nothing is changed, where that would not do."""

    def enter(self) -> bool:
        """Let the module run as a region; False where it was changed since it left."""


class PlainRegions:
    """Called at the end of every step.

    Args:
        regions: all of the session's, in forward order.

    Attributes:
        unseen: numbers of the regions that ran as their modules' own in the step that ends.
    """

    def __init__(self, regions: Sequence[Region]):
        self.unseen: frozenset[int] = frozenset()
        self._regions = regions
        self._modules: dict[str, RegionModule] = {}
        self._left: set[str] = set()
        self._settled_for: Decisions | None = None
        self._warned = False

    def add(self, region: Region, module: RegionModule) -> None:
        """The module of a region."""
        self._modules[region.name] = module

    def end_step(self, decisions: Decisions | None) -> None:
        """The next step runs by these decisions; None: there are none yet, or plans are tried."""
        if self._settled_for is decisions is not None:
            return
        first: set[str] = set()
        for region in self._regions:
            if region.is_plain and region.key in first:
                module = self._modules.get(region.name)
                if region.name not in self._left and module is not None and module.leave():
                    self._left.add(region.name)
            elif region.name in self._left:
                self._enter(region)
            if region.is_plain:
                first.add(region.key)
        self._settled_for = decisions
        self.unseen = frozenset(i for i, region in enumerate(self._regions) if region.name in self._left)

    def enter_all(self) -> None:
        """One is given more than was planned for, in the middle of a step: all run as regions again, but those whose
        recompute passes launch collectives, as all ranks must do the same there.
        """
        self._settled_for = None
        for region in self._regions:
            if region.name in self._left and not region.native.communicates:
                self._enter(region)

    def _enter(self, region: Region) -> None:
        if self._modules[region.name].enter():
            self._left.discard(region.name)
        elif not self._warned:
            self._warned = True
            text = (
                "memplug: module %s was compiled, or its forward replaced, while memplug had released it, since the "
                "device had room: it stays released. Detach before such a change, and attach again after it"
            )
            log.warning(coded("MP003", text), region.name)
