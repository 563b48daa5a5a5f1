"""The swap list as a technique: plans a list for one program from a recorded step, and swaps by it.

waiting ──a program lasts──► recording ──► planning, beside training ──► swapping
                 │                                      └── impossible ─► short
                 └──────── the step fits without ─────────────────────► fits

Without a list, a step that does not fit still completes, but slowly: tensors are offloaded when a request for memory
fails.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Hashable

import numpy as np
import torch

from memplug import native
from memplug.beside import Beside
from memplug.errors import SwapError
from memplug.profile.recorder import Detail
from memplug.profile.tensors import lives, ranking
from memplug.profile.trace import Trace
from memplug.session.given import Given
from memplug.session.technique import Technique
from memplug.sizes import UNLIMITED_BYTES
from memplug.swap.in_force import InForce, Relief
from memplug.swap.judge import mistakes_of_places
from memplug.swap.plan.from_trace import clock_of
from memplug.swap.plan.part import SwapBudgets, SwapPart, plan_part
from memplug.swap.promises import Promises
from memplug.swap.report import SwapReport, report_of
from memplug.swap.room import ListRoom
from memplug.words import size

MISSED_SHARE = 0.05  # a step counts against a list if more than this share of the list's tensors is not found
MISSED_STEPS = 3  # after this many such steps in a row, memplug makes a new list
# A new list replaces an earlier one only if the step still needs a list. A recorded step may fit just because its batch
# is shorter: memplug records up to this many further steps before it concludes that no list is needed.
OTHERS = 3
MEASURED_STEP = 2  # the second step under a list is measured: the first is not seen from its beginning


class SwapState(enum.Enum):
    """The states of the technique."""

    WAITING = "waiting"  # no program has repeated yet
    RECORDING = "recording"  # the next step is recorded, to plan from it
    PLANNING = "planning"  # beside training
    FITS = "fits"  # the step keeps to its budget without a list
    SHORT = "short"  # no list keeps to the budgets: tensors are offloaded when a request fails
    SWAPPING = "swapping"
    OFF = "off"


class _ListWork:
    """The work for one program, which rests while others run.

    Attributes:
        beside: the process beside training that plans for it.
        room: the device bytes that its steps may use.
        state: see `SwapState`.
        part: its part of the plan; None before there is one.
        promises: predictions of its list, compared with its steps; None without a list.
        steps: steps since its part was installed first.
        missing_steps: steps in a row that lacked tensors of the list.
        sizes_vary: whether sizes of the list's tensors differ from step to step.
        compared: if sizes vary, a step to compare the planned one with.
        resident: the model's tensors, by their numbers in the recorded step.
        others_left: how many further steps may be recorded, see `OTHERS`.
    """

    def __init__(self, beside: Beside, room: ListRoom):
        self.beside, self.room = beside, room
        self.state = SwapState.WAITING
        self.part: SwapPart | None = None
        self.promises: Promises | None = None
        self.steps = self.missing_steps = self.others_left = 0
        self.sizes_vary = False
        self.compared: Trace | None = None
        self.resident: tuple[int, ...] = ()


class SwapsWhole(Technique[SwapPart]):
    """The technique of the swap list; its states are drawn at the top of this file.

    Args:
        given: see `memplug.session.given.Given`.
    """

    name = SwapPart.name
    part_type = SwapPart
    mistakes_of = staticmethod(mistakes_of_places)  # planning has already judged the list on its step
    report_type = SwapReport
    relieves = True

    def __init__(self, given: Given):
        self._given, self._tell = given, given.tell
        self._device = device = given.device
        self._core = native.load()
        swap = given.config.swap
        self._min_bytes, self._states = swap.min_bytes, swap.states
        self._in_force = InForce(device, self._core, self._min_bytes, given.host_bytes, given.explain)
        self._missed = 0  # number of the list's tensors that were not found, since the list was put into force
        self._is_in_step = False
        self._is_back = False  # whether the list was put into force again since the last step of its program
        self._key: Hashable = None
        self._works: dict[Hashable, _ListWork] = {}

    @property
    def _work(self) -> _ListWork:
        if self._key not in self._works:
            given = self._given
            room = ListRoom(given.config.device_budget_gib, given.device, given.reserved)
            self._works[self._key] = _ListWork(given.beside(), room)
        return self._works[self._key]

    @property
    def part(self) -> SwapPart | None:
        """Return the program's part; None before there is one."""
        return self._work.part

    @property
    def promises(self) -> Promises | None:
        """Return the predictions of the list in force, compared with its steps; None without a list."""
        return self._work.promises

    @classmethod
    def make(cls, given: Given) -> SwapsWhole:
        """Return a session's technique, which is off if nothing can be swapped here.

        Raises:
            SwapError: nothing can be swapped here, and `swap.enabled` is true.
        """
        technique = cls(given)
        why = technique._why_impossible()
        if why and given.config.swap.enabled is True:
            advice = 'Set "swap": {"enabled": "auto"}, which trains without a swap list here, or remove that cause.'
            raise SwapError(f"there is no swap list: {why}", advice, code="MP015")
        technique.off_because = why
        if not why:
            technique._watch()
        return technique

    @property
    def state(self) -> SwapState:
        """Return the present state; OFF once the technique is switched off."""
        return SwapState.OFF if self.off_because else self._work.state

    @property
    def counters(self) -> dict[str, int]:
        """Return the counts over all steps of the session."""
        return self._in_force.counters

    @property
    def relief(self) -> list[Relief]:
        """Return the actions taken in the last step in which a request failed, in order."""
        return self._in_force.relief

    # -- steps ---------------------------------------------------------------------------------------------------------

    @property
    def detail(self) -> Detail | None:
        """Return the detail with which to record the next step, to plan from it or to measure its peak; else None."""
        if self.state is SwapState.SWAPPING and self._work.steps == MEASURED_STEP - 1:
            return Detail.REQUESTS
        return Detail.TENSORS if self.state is SwapState.RECORDING else None

    def begin_step(self) -> None:
        """Start swapping: tensors are offloaded and prefetched until the step ends."""
        if self._device.kind == "cpu" and not self.off_because:
            self._core.limit_cpu(self._work.room.budget_bytes)  # the CPU stands in for a device of that size
            for tensor in self._given.tensors() if self._states else ():
                self._core.count_cpu(tensor)
        self._is_in_step = True
        self._in_force.begin_step()
        self._in_force.measure(
            waits=self.state is SwapState.SWAPPING and self._work.steps == MEASURED_STEP - 1,
            operators=self.state is SwapState.RECORDING,
        )

    def end_step(self) -> None:
        """Stop swapping: between two steps all tensors are on the device, unless it has no room for some."""
        work, self._is_in_step = self._work, False
        self._in_force.end_step()
        self._in_force.measure()
        if self.state is SwapState.RECORDING and self._states:
            work.resident = tuple(self._core.recorded_numbers(list(self._given.tensors())))
        work.steps += 1
        if work.promises is not None and work.steps >= MEASURED_STEP and work.promises.stall_s is None:
            work.promises.compare_stall(self._in_force.waited_s())
        if self._device.kind == "cpu" and not self.off_because:
            # The limit holds only within steps, so that it does not count memory that memplug allocates between them.
            self._core.limit_cpu(UNLIMITED_BYTES)

    # -- the four verbs ------------------------------------------------------------------------------------------------

    def propose(self, trace: Trace | None) -> SwapPart | None:
        """Return a new part; None if there is none yet, or the part in force stays.

        The part has no tensors if the step fits without a list, or if no list suffices.
        """
        work = self._work
        if work.part is not None:
            if trace is not None and work.steps == MEASURED_STEP and work.promises is not None:
                work.promises.compare_peak(trace)
            if not work.part.targets:
                return None
            missed = self._in_force.missed - self._missed
            self._missed += missed
            if self._is_back or self.joins_late:  # the list may not have seen the step from its beginning
                self._is_back = False
                return None
            if self._departs(missed):
                self._tell(
                    "swap list: sizes of its tensors change from step to step: planning without those that change",
                    logging.INFO,
                )
                work.sizes_vary = True
                self._plan_anew()
            elif missed == 0 and work.steps >= MEASURED_STEP and work.room.tighten(self._in_force.relieved_bytes):
                self._tell("swap list: a step lacked device memory: planning with a smaller budget", logging.INFO)
                self._plan_anew()
            return None
        if work.beside.is_busy:
            return self._planned()
        if work.state is SwapState.WAITING and self.whole_steps:  # only a whole step shows whether it fits
            if work.room.holds(bool(self.relief)):
                return SwapPart()
            work.state = SwapState.RECORDING
        elif work.state is SwapState.RECORDING and trace is not None and not self._in_force.has_failed:
            return self._plan(trace)
        return None

    def install(self, part: SwapPart) -> None:
        """Swap by this list from the next step on.

        Raises:
            SwapError: the host has too little memory for it.
        """
        work, self._missed = self._work, 0
        is_new = part is not work.part
        self._is_back = not is_new
        work.beside.stop()
        self._end()
        if part.targets:
            self._in_force.swap(part)
        if is_new:
            work.part, work.compared = part, None
            work.state = SwapState.SWAPPING if part.targets else SwapState.SHORT if part.impossible else SwapState.FITS
            work.missing_steps = work.steps = 0
            work.promises = Promises(part, self._tell, self._device.kind == "cpu") if part.targets else None
        if is_new and part.targets:
            self._tell(
                f"swap list: {len(part.targets)} tensors, {size(part.swapped_bytes)} away between two uses; predicted "
                f"peak {size(part.predicted_peak_bytes)}, waiting {part.predicted_stall_s:.3g} s a step",
                logging.INFO,
            )
        if work.state is SwapState.SHORT:
            self._watch()
        if self._is_in_step:
            self.begin_step()

    def withdraw(self) -> None:
        """Stop swapping by the list; tensors are still offloaded if a request fails."""
        self._end()
        if not self.off_because:
            self._watch()
            if self._is_in_step:
                self.begin_step()
            return
        self._in_force.give_back()
        if self._device.kind == "cpu":
            self._core.limit_cpu(-1)

    def turn(self, key: Hashable) -> None:
        """Go on with the work for this program: see `Technique`."""
        self._key = key

    def forget(self, key: Hashable) -> None:
        """Drop a program's recorded steps and its list."""
        work = self._works.pop(key, None)
        if work is not None:
            work.beside.stop()

    def _plan_anew(self) -> None:
        work = self._work
        work.beside.stop()
        work.part, work.promises, work.compared = None, None, None
        work.state, work.others_left = SwapState.RECORDING, OTHERS
        self.withdraw()

    def _watch(self) -> None:
        try:
            self._in_force.watch()
        except SwapError as error:
            self._tell(f"until there is a swap list, a step that does not fit fails: {error.problem}", logging.INFO)

    def _end(self) -> None:
        if not self._in_force.end():
            self._tell("the device has no room for tensors that were swapped: they stay on the host", logging.WARNING)

    def report(self) -> SwapReport:
        """Return the swap list's report; see `memplug.swap.report`."""
        return report_of(self.state.value, self.off_because, self._work.part, self._work.promises, self.counters)

    def _departs(self, missed: int) -> bool:
        """Return whether to plan without tensors whose sizes change: too many were missing, several steps in a row."""
        missing = missed > MISSED_SHARE * len(self._work.part.targets)
        self._work.missing_steps = self._work.missing_steps + 1 if missing else 0
        return self._work.missing_steps >= MISSED_STEPS and not self._work.sizes_vary

    # -- planning ------------------------------------------------------------------------------------------------------

    def _why_impossible(self) -> str:
        if not self._core.StorageSwapper.is_possible():
            return f"torch {torch.__version__} does not report writes to tensors; torch 2.13 does"
        if self._work.room.budget_bytes is None:
            return '"device_budget_gib" sets no limit for this CPU'
        return ""

    def _plan(self, trace: Trace) -> SwapPart | None:
        work = self._work
        if int(trace.live_bytes.max(initial=0)) <= work.room.budget_bytes:
            work.others_left -= 1
            return None if work.others_left >= 0 else SwapPart()
        if work.sizes_vary and work.compared is None:
            work.compared = trace
            return None
        d2h, h2d = self._device.link_rates()
        budgets = SwapBudgets(
            device_bytes=work.room.of_list(trace),
            host_bytes=self._given.host_bytes(),
            min_bytes=self._min_bytes,
            d2h_bytes_per_s=d2h,
            h2d_bytes_per_s=h2d,
        )
        seconds = self._in_force.operators_s(clock_of(trace))
        work.state = SwapState.PLANNING
        others = _others(trace, self._given.has_regions, work.compared)
        states = self._states, work.resident
        work.beside.begin(plan_part, trace, budgets, seconds, others, self._given.layer_bytes(), *states)
        return self._planned()

    def _planned(self) -> SwapPart | None:
        """Return the planned part; None while planning goes on."""
        work = self._work
        if not work.beside.is_done:
            return None
        try:
            return work.beside.take()
        except SwapError as error:
            if work.room.loosen():
                work.state = SwapState.RECORDING
                return None
            self._tell(f"no swap list: {error}", logging.WARNING)
            return SwapPart(impossible=error.problem)


def _others(trace: Trace, of_regions: bool, compared: Trace | None) -> frozenset[int]:
    """Return the tensors that a list must leave alone: those used in regions, and those that depend on data.

    Args:
        trace: the recorded step.
        of_regions: include the tensors used in regions, which another technique swaps.
        compared: another step: include the tensors that a list would not find in it; None: include none.
    """
    in_layers = trace.operators["layer"][trace.uses["operator"]] >= 0
    found = set(trace.uses["tensor"][in_layers].tolist()) if of_regions else set()
    if compared is not None:
        ranks, known = ranking(trace), ["nbytes", "count", "tag", "stack"]
        own, its = (lives(each, ranks)[known] for each in (trace, compared))
        found |= set(np.flatnonzero(~np.isin(own, its)).tolist())
    return frozenset(found)
