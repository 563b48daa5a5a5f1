"""Token-wise offloading and recomputation as a technique.

It makes the decisions for a program's regions, and changes their settings between two steps.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from memplug.errors import coded
from memplug.plans.schema import MemoryPlan
from memplug.profile.recorder import Detail
from memplug.profile.similarity import Program
from memplug.profile.trace import Trace
from memplug.session.given import AgreedGiven
from memplug.session.technique import AgreedTechnique
from memplug.tokenwise import budgets, planning
from memplug.tokenwise.budgets import DeviceBudget
from memplug.tokenwise.checking import AlphaCheck
from memplug.tokenwise.engine.executor import Executor
from memplug.tokenwise.engine.hooks import EngineHooks
from memplug.tokenwise.judge import mistakes_of
from memplug.tokenwise.plain_regions import PlainRegions
from memplug.tokenwise.plan.decisions import Decisions, Learnt, Setting
from memplug.tokenwise.predictions import Predictions
from memplug.tokenwise.report import TokenwiseReport, plan_in_words, report_of
from memplug.tokenwise.room import Room
from memplug.tokenwise.rounding import Rounding
from memplug.tokenwise.search import PlanSearch
from memplug.tokenwise.shortage import Shortage
from memplug.words import size

log = logging.getLogger("memplug")


@dataclass(eq=False, slots=True)
class _Work:
    """The decisions of one program, and the search for them while it goes on."""

    decisions: Decisions | None = None
    search: PlanSearch | None = None


class TokenWise(AgreedTechnique[Decisions]):
    """The technique that swaps and recomputes by fractions of rows (tokens).

    Attributes:
        executor: runs the regions.
        plain: see `PlainRegions`.
        check: see `AlphaCheck`.
        predictions: see `Predictions`.
        rounding: see `Rounding`.
    """

    name = Decisions.name
    part_type = Decisions
    mistakes_of = staticmethod(mistakes_of)
    report_type = TokenwiseReport

    def __init__(self, given: AgreedGiven):
        config, tokenwise, device = given.config, given.config.tokenwise, given.device
        self._given, self._regions, self._ranks = given, given.regions, given.ranks
        self._alpha, self._tries = tokenwise.alpha, config.profiler.policy_steps
        self._is_on = tokenwise.enabled and given.has_regions
        self.plans = self._is_on and isinstance(self._alpha, str)
        self._budget = DeviceBudget(device, config.device_budget_gib, has_buffers=not given.is_served)
        self.plain = PlainRegions(self._regions)
        self.executor = Executor(
            device,
            budgets.host_budget_bytes(config, device),
            tokenwise.min_offload_bytes,
            given.regathers,
            tokenwise.buffers,
            EngineHooks(explain=given.explain, on_larger=self.plain.enter_all, own=given.own),
        )
        self._key: Hashable = None
        self._works: dict[Hashable, _Work] = {None: _Work()}
        fixed = None if isinstance(self._alpha, str) else self._alpha
        for region in self._regions if fixed is not None else ():
            region.set(Setting(region.kind, fixed, is_agreed=True))
        self.check = AlphaCheck(fixed if self._is_on else None, self._budget, self._regions, self.executor, self._ranks)
        self.predictions = Predictions(self.executor)
        self.rounding = Rounding(self._budget, self.executor, planned=self.plans)
        self._sizes: tuple[tuple[int, ...], ...] = ()  # sizes of each forward's inputs in the last step
        self._shortage = Shortage(self.executor, self._ranks)
        self._room = Room(self._budget, self._ranks, given.reserved)

    # -- the four verbs ------------------------------------------------------------------------------------------------

    def propose(self, trace: Trace | None) -> Decisions | None:
        """Observe the next step, and try plans in the steps that follow: see `memplug.tokenwise.search`."""
        self._work.search = PlanSearch(
            *(self._regions, self.executor, self._ranks),
            budget=self._budget,
            beside=self._given.beside(),
            tries=self._tries,
            alpha=self._alpha,
            is_relieved=self._given.is_relieved,
            step_peak=self._given.step_peak,
            step_trace=self._given.step_trace,
            room=self._room.of_step,
            keeps=self.may_keep,
            share_of=self.share_of,
        )
        self._work.search.enter()
        return None

    def advance(self, step: int) -> Decisions | None:
        """Go on with the search by the measurements of a step: see `AgreedTechnique`."""
        search = self._work.search
        decisions = search.advance(step)
        if decisions is None:
            search.enter()
            return None
        if not search.fits and self._ranks.first:
            text = (
                "memplug: every plan that was tried took more memory than it should have; training goes on with the "
                'one that keeps the least on the device. Set "device_budget_gib" or "host_budget_gib" to the memory '
                "that is free"
            )
            log.warning(coded("MP013", text))
        self.outcome = search.outcome
        return decisions

    def install(self, part: Decisions) -> None:
        """Run the regions by these decisions."""
        self._stop_search()
        if part is not self.decisions:
            planning.put(part, self._regions, self.executor)
        self._work.decisions = part

    def withdraw(self) -> None:
        """Run the regions at the safest setting."""
        self._stop_search()
        planning.put(None, self._regions, self.executor)
        self._work.decisions = None

    # -- programs that take turns --------------------------------------------------------------------------------------

    @property
    def _work(self) -> _Work:
        return self._works[self._key]

    @property
    def decisions(self) -> Decisions | None:
        """Return the decisions in force; None at the safest setting, with a number for alpha, and in gen-policy."""
        return self._work.decisions

    def turn(self, key: Hashable) -> None:
        """Run by the decisions of a program, or by its search, from the next forward on: see `AgreedTechnique`."""
        if key is self._key:
            return
        if self._work.search is not None:
            self._work.search.leave()
        for region in self._regions:
            region.turn(key)
        self._key = key
        work = self._works.setdefault(key, _Work())
        if work.search is not None:
            work.search.enter()
        else:
            planning.hold_to(work.decisions, self.executor)

    @property
    def is_free(self) -> bool:
        """Return whether this rank may turn alone: see `AgreedTechnique`."""
        return self._is_free_under(self._key)

    def _is_free_under(self, key: Hashable) -> bool:
        alone = self.executor.is_alone()
        if self.executor.regathers and not alone:
            return False
        return not any(region.communicates_in(key, unless=alone) for region in self._regions)

    def turn_freely(self, key: Hashable) -> bool:
        """Turn on this rank alone, unless a region's recompute passes may launch collectives: see `AgreedTechnique`."""
        if not (self.is_free and self._is_free_under(key)):
            return False
        self.turn(key)
        self.plain.end_step(self.decisions)
        return True

    def forget(self, key: Hashable) -> None:
        """Drop the decisions of a program, and the search for them."""
        if key is self._key:
            self.withdraw()
            return
        if (work := self._works.pop(key, None)) is not None and work.search is not None:
            work.search.stop()
        for region in self._regions:
            region.forget(key)

    # -- how it begins -------------------------------------------------------------------------------------------------

    def beginning(self) -> str:
        """Return the number of regions and what sets their decisions, in words for the log."""
        if self.plans:
            return f"{len(self._regions)} regions, to be planned once the program repeats"
        return f"{len(self._regions)} regions, alpha {self._alpha}" if self._is_on else "no regions"

    @property
    def unwatched_because(self) -> str:
        """Return why steps need not be compared by their operators; "" if they must be: see `AgreedTechnique`."""
        if not self._is_on:
            return "there are no token-wise plans, and only they need the operators of steps to be compared"
        return (
            ""
            if self.plans
            else "with a number for alpha there is no plan, so the operators of steps need not be compared"
        )

    # -- called by the stages ------------------------------------------------------------------------------------------

    def begin_program(self) -> None:
        """Start a step's clock, at its first forward with gradients, if the step is observed or tries a plan."""
        if self._work.search is not None:
            self._work.search.begin_program()

    def has_lost_room(self) -> bool:
        """Return whether the plan keeps more than the device has room for: see `memplug.tokenwise.room`."""
        return self._room.is_short(self.decisions)

    def retain(self, parts: Iterable[Decisions]) -> None:
        """Release the pinned host memory if no plan in `parts` needs host memory."""
        if not any(decisions.solution.host_bytes for decisions in parts):
            self.executor.pool.give_back()

    def layer_bytes(self) -> dict[str, int]:
        """Return the bytes that each layer's last forward offloaded: see `memplug.session.given.Given`."""
        return {region.name: region.native.sent_bytes for region in self._regions}

    def free_host_bytes(self) -> int:
        """Return the bytes of the host budget that the pool has not pinned yet."""
        return self.executor.pool.budget_bytes - self.executor.pool.capacity_bytes

    def in_words(self, part: Decisions) -> str:
        """Return a plan in one line."""
        return plan_in_words(part.solution)

    @property
    def has_run(self) -> bool:
        """Return whether a region ran forward with gradients."""
        return self.executor.flow.forwards > 0

    def report(self) -> TokenwiseReport:
        """Return the report of this technique: see `memplug.tokenwise.report`."""
        return report_of(
            *(self._alpha, self._regions, self.executor, self.decisions, self.check, self.predictions),
            self.rounding.peak_bytes(self.decisions),
        )

    @property
    def detail(self) -> Detail | None:
        """Return how to record the next step; None if that step is neither observed nor tries a plan."""
        search = self._work.search
        return search.detail if search is not None else None

    # -- between two steps ---------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """Close the step's forwards, and note the sizes of their inputs."""
        self._sizes = self.executor.flow.end_step([region.native for region in self._regions])

    def program(self, operators: np.ndarray | None, nodes: int) -> Program:
        """Return the program of the step that ended, with the sizes of the regions' inputs."""
        return Program(operators, self._sizes, nodes, self.plain.unseen)

    def agree(self, step: int, program: Program, planned_from: Program | None, is_stable: bool) -> None:
        """Run the checks for which all ranks exchange values, at the end of a step.

        Swap fewer rows if the host memory of a rank ran out, compare the step's offloaded bytes with its plan, and
        check a number for alpha against link and host.
        """
        if self._work.search is not None:
            self._work.search.measure(step, program)
        if self._given.has_regions and is_stable:
            self._shortage.end_step()
        else:
            self._shortage.skip_step()
        if self.plans:
            self.predictions.end_step(self.decisions, program, planned_from)
        self.check.end_step()

    def settle(self, is_stable: bool, is_served: bool) -> None:
        """Update plain regions and rounding buffers; while the arena serves, no rounding buffers are reserved."""
        if self.plans:
            self.plain.end_step(self.decisions)
        self.rounding.end_step(self.decisions, is_stable and not is_served)

    def turn_away(self) -> None:
        """Run regions at the safest setting in the step that begins: the plan was not made for the step's inputs.

        Regions whose recompute passes launch collectives keep their setting: all ranks have to change it together.
        """
        self.plain.enter_all()
        for region in self._regions if not self.executor.regathers else ():
            if not region.native.communicates:
                region.set(Setting(region.kind))
                region.native.seen = False
        self._work.decisions = None

    @property
    def may_talk(self) -> bool:
        """Return whether regions may take part in collectives.

        If so, all ranks have to change settings together, since collectives depend on the settings.
        """
        return self.executor.regathers or any(region.native.may_talk for region in self._regions)

    def stay(self) -> None:
        """Keep the regions' settings for good, since ranks no longer agree on changes."""
        self._stop_search()
        for work in self._works.values():
            if work.search is not None:
                work.search.stop()
        self.check.stop()

    def close(self) -> None:
        """Release all resources: the session is detached, and no region runs any more."""
        self.executor.close()

    # -- from run to run -----------------------------------------------------------------------------------------------

    def keep(self, part: Decisions, plan: MemoryPlan) -> MemoryPlan:
        """Return `plan` with these decisions added, together with findings of their forwards and the link rates."""
        d2h, h2d = self.executor.device.link_rates()
        key = next((key for key, work in self._works.items() if work.decisions is part), self._key)
        settings = {
            region.name: replace(part.settings[region.name], learnt=_learnt(region.native_in(key)))
            for region in self._regions
            if region.name in part.settings
        }
        return plan.with_part(replace(part, settings=settings, d2h_bytes_per_s=d2h, h2d_bytes_per_s=h2d))

    def reserve(self, parts: Iterable[Decisions]) -> None:
        """Reserve as much host memory as any plan in `parts` needs."""
        self.executor.pool.reserve(max(decisions.solution.host_bytes for decisions in parts))

    def lacks(self, part: Decisions) -> str:
        """Return why this machine has no room for these decisions; "" if it has room."""
        host_bytes, budget_bytes = part.solution.host_bytes, self.executor.pool.budget_bytes
        if host_bytes > budget_bytes:
            return f"it swaps {size(host_bytes)}, and the host budget is {size(budget_bytes)}"
        device_bytes = self._budget.nbytes
        if part.peak_bytes is not None and device_bytes is not None and part.peak_bytes > device_bytes:
            return f"it takes {size(part.peak_bytes)} of the device, which has {size(device_bytes)}"
        return ""

    def _stop_search(self) -> None:
        search, self._work.search = self._work.search, None
        if search is not None:
            search.leave()
            search.stop()


def _learnt(native: Any) -> Learnt:
    return Learnt(native.communicates, native.offloads_late, native.unneeded, native.asks)
