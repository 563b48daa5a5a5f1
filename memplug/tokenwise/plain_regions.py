"""Gives the modules of plain regions their own class back, so that they run as if memplug were not there.

A region is plain if its plan lets it run as without memplug. Among plain regions that share a plan, the first one's
module keeps memplug's class: its forward begins the step's program, and checks the size of its arguments. If these
arguments are larger than in the step that the plan was made from, the other modules get memplug's class again before
they run.
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
        """Give the module its own class back.

        Returns:
            False if that is not possible; then nothing is changed.
        """

    def enter(self) -> bool:
        """Let the module run as a region again.

        Returns:
            False if the module was compiled, or its forward replaced, since `leave`; then nothing is changed.
        """


class PlainRegions:
    """Decides which modules of plain regions have their own class; called at the end of every step.

    Args:
        regions: all regions of the session, in forward order.

    Attributes:
        unseen: indices, in `regions`, of the regions whose modules had their own class when the step began.
    """

    def __init__(self, regions: Sequence[Region]):
        self.unseen: frozenset[int] = frozenset()
        self._regions = regions
        self._modules: dict[str, RegionModule] = {}
        self._left: set[str] = set()
        self._settled_for: Decisions | None = None
        self._warned = False

    def add(self, region: Region, module: RegionModule) -> None:
        """Add the module of a region."""
        self._modules[region.name] = module

    def end_step(self, decisions: Decisions | None) -> None:
        """Give modules their own class, or memplug's, for the next step.

        Args:
            decisions: the next step's decisions; None: there are none yet, or the step tries a plan.
        """
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
        """Run all modules as regions again, because a step has larger or other inputs than the plan was made for.

        Regions whose recompute passes launch collectives stay plain: all ranks must launch the same collectives.
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
