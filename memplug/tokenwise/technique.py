"""Token-wise offloading and recomputation as a technique: decisions for the operators of a program's regions, and all
that happens to regions between two steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from memplug.config import MemplugConfig
from memplug.device.device import Device
from memplug.device.reserved import Reserved
from memplug.plans.schema import MemoryPlan
from memplug.profile.recorder import Detail
from memplug.profile.similarity import Program
from memplug.profile.trace import Trace
from memplug.session.ranks import Ranks
from memplug.session.technique import AgreedTechnique
from memplug.tokenwise import budgets, planning
from memplug.tokenwise.checking import AlphaCheck
from memplug.tokenwise.engine.executor import Executor
from memplug.tokenwise.engine.hooks import Hooks
from memplug.tokenwise.engine.region import Region
from memplug.tokenwise.judge import mistakes_of
from memplug.tokenwise.plain_regions import PlainRegions
from memplug.tokenwise.plan.decisions import Decisions, Learnt, Setting
from memplug.tokenwise.predictions import Predictions
from memplug.tokenwise.report import plan_in_words
from memplug.tokenwise.room import Room
from memplug.tokenwise.rounding import Rounding
from memplug.tokenwise.search import Search
from memplug.tokenwise.shortage import Shortage
from memplug.words import size

log = logging.getLogger("memplug")


class TokenWise(AgreedTechnique[Decisions]):
    """See the module's text.

    Args:
        regions: the modules' regions, in forward order.
        regathers: forward gathers parameters (ZeRO 3).
        explain: an error of the device's memory passes, in a phase of a region.
        own: `with own():` around operators that are no part of the program.
        step_peak: largest allocation total of the device since it was called last, in bytes; None: unknown.
        step_trace: the last step that was recorded in detail, None where none was.
        reserved: beside the tensors of a step.

    Attributes:
        executor: runs the regions.
        plain: of these, those that run as without memplug.
        decisions: that they run by; None at the safest setting, with a number for alpha, and while plans are tried.
        plans: regions run by plans; else by a number for alpha, or there are none.
        observer, check, predictions, rounding: see there.
        sizes: of the inputs of each forward, in the step that ended last.
    """

    name = Decisions.name
    part_type = Decisions
    mistakes_of = staticmethod(mistakes_of)

    def __init__(
        self,
        config: MemplugConfig,
        regions: Sequence[Region],
        device: Device,
        regathers: bool,
        explain: Callable[[str, Region, BaseException], None],
        own: Callable[[], AbstractContextManager[Any]],
        ranks: Ranks,
        step_peak: Callable[[], int | None],
        step_trace: Callable[[], Trace | None],
        reserved: Reserved,
    ):
        tokenwise, host_bytes = config.tokenwise, budgets.host_budget_bytes(config, device)
        self._config, self._regions, self._ranks = config, regions, ranks
        self._peaks = step_peak, step_trace
        self.plain = PlainRegions(regions)
        hooks = Hooks(explain=explain, on_larger=self.plain.enter_all, own=own)
        self.executor = Executor(device, host_bytes, tokenwise.min_offload_bytes, regathers, tokenwise.buffers, hooks)
        self.plans = tokenwise.enabled and isinstance(tokenwise.alpha, str)
        self.decisions: Decisions | None = None
        self.observer = planning.Observer(self.executor.min_offload_bytes)
        self.check = AlphaCheck(config, regions, self.executor, ranks)
        self.predictions = Predictions(self.executor)
        self.rounding = Rounding(config, self.executor, planned=self.plans)
        self.sizes: tuple[tuple[int, ...], ...] = ()
        self._shortage = Shortage(self.executor, ranks)
        self._room = Room(config, device, ranks, reserved)
        self._search: Search | None = None

    # -- the four verbs ------------------------------------------------------------------------------------------------

    def propose(self, trace: Trace | None) -> Decisions | None:
        """Observe the next step, and try plans in those that follow: see `memplug.tokenwise.search`."""
        search = self._search
        if search is None:
            self._search = Search(
                *(self._regions, self.executor, self.observer, self._config, self._ranks, *self._peaks),
                *(self._room.of_step, self.may_keep),
            )
            return None
        decisions = search.end_step()
        if decisions is None:
            return None
        if not search.fits and self._ranks.first:
            log.warning(
                "memplug: every plan that was tried took more memory than it should have, and the one that keeps the "
                'least on the device is used: set "device_budget_gib" or "host_budget_gib" to what there is'
            )
        self.outcome = search.outcome
        return decisions

    def install(self, part: Decisions) -> None:
        """Run the regions by it."""
        self._stop_search()
        if part is not self.decisions:
            planning.put(part, self._regions, self.executor)
        self.decisions = part

    def withdraw(self) -> None:
        """Run the regions at the safest setting."""
        self._stop_search()
        planning.put(None, self._regions, self.executor)
        self.decisions = None

    # -- what the stages ask -------------------------------------------------------------------------------------------

    def begin_program(self) -> None:
        """The step's first forward with gradients begins."""
        if self._search is not None:
            self._search.begin_program()

    def has_lost_room(self) -> bool:
        """See `memplug.tokenwise.room`."""
        return self._room.is_short(self.decisions)

    def retain(self, parts: Iterable[Decisions]) -> None:
        """Where none of them needs host memory, it goes back."""
        if not any(decisions.solution.host_bytes for decisions in parts):
            self.executor.pool.give_back()

    def layer_bytes(self) -> dict[str, int]:
        """See `memplug.session.technique.Given`."""
        return {region.name: region.native.sent_bytes for region in self._regions}

    def in_words(self, part: Decisions) -> str:
        """See `memplug.show.words`."""
        return plan_in_words(part.solution)

    @property
    def detail(self) -> Detail | None:
        """Of the step that is observed, and of those that try plans."""
        return self._search.detail if self._search is not None else None

    # -- between two steps ---------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """Close the forwards of the step."""
        self.sizes = self.executor.flow.end_step([region.native for region in self._regions])

    def share_host(self, stable: bool) -> None:
        """Swap less where the host memory of a rank has run out."""
        if self._regions and stable:
            self._shortage.end_step()
        else:
            self._shortage.skip_step()

    def compare(self, program: Program, planned_from: Program | None) -> None:
        """Compare what the step moved with what its plan said; `planned_from` is of the step that was observed."""
        self.predictions.end_step(self.decisions, program, planned_from)

    def settle(self, stable: bool, has_arena: bool) -> None:
        """What the next step is to run by is in force."""
        if self.plans:
            self.plain.end_step(self.decisions)
        self.rounding.end_step(self.decisions, stable and not has_arena)

    def turn_away(self) -> None:
        """The step that begins has other inputs than its plan was made for: regions run at the safest setting. But not
        where that would change which collectives a recompute pass launches: all ranks have to agree on that first.
        """
        self.plain.enter_all()
        for region in self._regions if not self.executor.regathers else ():
            if not region.native.communicates:
                region.set(Setting(region.kind))
                region.native.seen = False
        self.decisions = None

    @property
    def may_talk(self) -> bool:
        """Whether regions take part in collectives, which depend on what they run by: all ranks have to do it alike."""
        return self.executor.regathers or any(region.native.may_talk for region in self._regions)

    def stay(self) -> None:
        """Ranks decide nothing together any more: regions run on as they do."""
        self._stop_search()
        self.check.stop()

    def close(self) -> None:
        """The session is detached."""
        self._stop_search()

    # -- from run to run -----------------------------------------------------------------------------------------------

    def keep(self, part: Decisions, plan: MemoryPlan) -> MemoryPlan:
        """The plan with these decisions, what forwards have shown under them, and the link that they were made for."""
        d2h, h2d = self.executor.device.link_rates()
        settings = {
            region.name: replace(part.settings[region.name], learnt=_learnt(region))
            for region in self._regions
            if region.name in part.settings
        }
        return plan.with_part(replace(part, settings=settings, d2h_bytes_per_s=d2h, h2d_bytes_per_s=h2d))

    def reserve(self, parts: Iterable[Decisions]) -> None:
        """The host memory that the largest of them needs."""
        self.executor.pool.reserve(max(decisions.solution.host_bytes for decisions in parts))

    def lacks(self, part: Decisions) -> str:
        """Why this machine has no room for a part; "" where it has."""
        host_bytes, budget_bytes = part.solution.host_bytes, self.executor.pool.budget_bytes
        if host_bytes > budget_bytes:
            return f"it swaps {size(host_bytes)}, and the host budget is {size(budget_bytes)}"
        device_bytes = budgets.device_bytes(self._config, self.executor.device)
        if part.peak_bytes is not None and device_bytes is not None and part.peak_bytes > device_bytes:
            return f"it takes {size(part.peak_bytes)} of the device, which has {size(device_bytes)}"
        return ""

    def _stop_search(self) -> None:
        if self._search is not None:
            self._search.stop()
            self._search = None


def _learnt(region: Region) -> Learnt:
    native = region.native
    return Learnt(native.communicates, native.offloads_late, native.unneeded, native.asks)
