"""The swap list as a technique: of one program, made of a step that was recorded of it.

waiting ──a program lasts──► recording ──► planning, beside training ──► swapping
                 │                                      └── impossible ─► short
                 └──────── the step fits without ─────────────────────► fits

Where there is no list, a step that does not fit completes slowly: tensors leave where a request for memory fails.
"""

from __future__ import annotations

import enum
import logging

import numpy as np
import torch

from memplug import native
from memplug.errors import SwapError
from memplug.profile.recorder import Detail
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
from memplug.swap.room import Room
from memplug.words import size

MISSED_SHARE = 0.05  # of a list's tensors, above which a step counts against it
MISSED_STEPS = 3  # in a row
OTHERS = 3  # recorded steps at most, where a list is made anew, that fit without one: a shorter batch's
MEASURED_STEP = 2  # under a list: the first one of a run is not seen from its beginning


class State(enum.Enum):
    """What the technique is doing."""

    WAITING = "waiting"  # for a program that repeats
    RECORDING = "recording"  # a step to plan from
    PLANNING = "planning"  # while training goes on
    FITS = "fits"  # the step keeps to its budget without
    SHORT = "short"  # no list keeps it to its budgets: tensors leave where a request fails
    SWAPPING = "swapping"
    OFF = "off"


class SwapsWhole(Technique[SwapPart]):
    """See the module's text.

    Attributes:
        part: in force; None: none is.
        promises: of the list in force, beside what happens.
    """

    name = SwapPart.name
    part_type = SwapPart
    mistakes_of = staticmethod(mistakes_of_places)  # against the recorded step a list was judged as it was made
    report_type = SwapReport
    relieves = True

    def __init__(self, given: Given):
        self.part: SwapPart | None = None
        self._given, self._tell, self._beside = given, given.tell, given.beside()
        self._device = device = given.device
        self._core, self._room = native.load(), Room(given.config.device_budget_gib, device, given.reserved)
        swap = given.config.swap
        self._min_bytes, self._states = swap.min_bytes, swap.states
        self._state = State.WAITING
        self._in_force = InForce(device, self._core, self._min_bytes, given.host_bytes, given.explain)
        self.promises: Promises | None = None
        self._missed = self._missing_steps = 0
        self._steps = 0  # since what is in force is
        self._sizes_vary = False  # of what layers ask for that are dynamic
        self._resident: tuple[int, ...] = ()  # of the recorded step's tensors, those of the model
        self._others_left = 0  # recorded steps that may fit, and be another program's

    @classmethod
    def make(cls, given: Given) -> SwapsWhole:
        """Raises `SwapError` where nothing can be swapped, if the block says `true`."""
        technique = cls(given)
        why = technique._why_impossible()
        if why and given.config.swap.enabled is True:
            advice = 'Set "swap": {"enabled": "auto"}, which goes without a swap list here, or mend that.'
            raise SwapError(f"there is no swap list: {why}", advice, code="MP015")
        technique.off_because = why
        if not why:
            technique._watch()
        return technique

    @property
    def state(self) -> State:
        return State.OFF if self.off_because else self._state

    @property
    def counters(self) -> dict[str, int]:
        """Over all steps of the session."""
        return self._in_force.counters

    @property
    def relief(self) -> list[Relief]:
        """What was done in the last step in which a request failed, in order."""
        return self._in_force.relief

    # -- steps ---------------------------------------------------------------------------------------------------------

    @property
    def detail(self) -> Detail | None:
        """A step to plan from is recorded with its tensors; one under the list, to see what it takes."""
        if self.state is State.SWAPPING and self._steps == MEASURED_STEP - 1:
            return Detail.REQUESTS
        return Detail.TENSORS if self.state is State.RECORDING else None

    def begin_step(self) -> None:
        """Tensors leave and return from here on."""
        if self._device.kind == "cpu" and not self.off_because:
            self._core.limit_cpu(self._room.budget_bytes)  # it stands in for a device that has no more
            for tensor in self._given.tensors() if self._states else ():
                self._core.count_cpu(tensor)
        self._in_force.begin_step()
        self._in_force.measure(
            waits=self.state is State.SWAPPING and self._steps == MEASURED_STEP - 1,
            operators=self.state is State.RECORDING,
        )

    def end_step(self) -> None:
        """Between two steps nothing is away, unless the device has no room for it."""
        self._in_force.end_step()
        self._in_force.measure()
        if self.state is State.RECORDING and self._states:
            self._resident = tuple(self._core.recorded_numbers(list(self._given.tensors())))
        self._steps += 1
        if self.promises is not None and self._steps >= MEASURED_STEP and self.promises.stall_s is None:
            self.promises.compare_stall(self._in_force.waited_s())
        if self._device.kind == "cpu" and not self.off_because:
            # what memplug itself does between two steps is no part of the device's
            self._core.limit_cpu(UNLIMITED_BYTES)

    # -- the four verbs ------------------------------------------------------------------------------------------------

    def propose(self, trace: Trace | None) -> SwapPart | None:
        """A list for the step that was recorded, or an empty one where that keeps to its budget, or none does."""
        if self.part is not None:
            if trace is not None and self._steps == MEASURED_STEP and self.promises is not None:
                self.promises.compare_peak(trace)
            if not self.part.targets:
                return None
            missed = self._in_force.missed - self._missed
            self._missed += missed
            if self._departs(missed):
                self._tell("swap list: tensors of experts have other sizes in every step: they stay", logging.INFO)
                self._sizes_vary = True
                self._plan_anew()
            elif missed == 0 and self._steps >= MEASURED_STEP and self._room.tighten(self._in_force.relieved_bytes):
                self._tell("swap list: a step took more than the device has: planning with some to spare", logging.INFO)
                self._plan_anew()
            return None
        if self._beside.is_busy:
            return self._planned()
        if self._state is State.WAITING and self.whole_steps:  # else the next one shows whether it fits
            if self._room.holds(bool(self.relief)):
                return SwapPart()
            self._state = State.RECORDING
        elif self._state is State.RECORDING and trace is not None and not self._in_force.has_failed:
            return self._plan(trace)
        return None

    def install(self, part: SwapPart) -> None:
        """Swap by this list.

        Raises:
            SwapError: the host has no memory for it.
        """
        self._beside.stop()
        self._end()
        if part.targets:
            self._in_force.swap(part)
            self._tell(
                f"swap list: {len(part.targets)} tensors, {size(part.swapped_bytes)} away between two uses; predicted "
                f"peak {size(part.predicted_peak_bytes)}, waiting {part.predicted_stall_s:.3g} s a step",
                logging.INFO,
            )
        self.part = part
        self._state = State.SWAPPING if part.targets else State.SHORT if part.impossible else State.FITS
        if self._state is State.SHORT:
            self._watch()
        self._missed = self._missing_steps = self._steps = 0
        self.promises = Promises(part, self._tell, self._device.kind == "cpu") if part.targets else None

    def withdraw(self) -> None:
        """All tensors stay where they are, unless a request fails."""
        self._room.forget()
        self._stay()

    def _plan_anew(self) -> None:
        self._stay()
        self._state, self._others_left = State.RECORDING, OTHERS

    def _stay(self) -> None:
        self._beside.stop()
        self._end()
        self.part, self.promises, self._state = None, None, State.WAITING
        if not self.off_because:
            self._watch()
        elif self._device.kind == "cpu":
            self._core.limit_cpu(-1)

    def _watch(self) -> None:
        try:
            self._in_force.watch()
        except SwapError as error:
            self._tell(f"a step that does not fit before there is a swap list fails: {error.problem}", logging.INFO)

    def _end(self) -> None:
        if not self._in_force.end():
            self._tell("the device has no room for tensors that were swapped: they stay on the host", logging.WARNING)

    def report(self) -> SwapReport:
        """See `memplug.swap.report`."""
        return report_of(self.state.value, self.off_because, self.part, self.promises, self.counters)

    def _departs(self, missed: int) -> bool:
        """Whether tensors of dynamic layers may be why many are not found, step after step."""
        missing = missed > MISSED_SHARE * len(self.part.targets)
        self._missing_steps = self._missing_steps + 1 if missing else 0
        return self._missing_steps >= MISSED_STEPS and not self._sizes_vary

    # -- planning ------------------------------------------------------------------------------------------------------

    def _why_impossible(self) -> str:
        if not self._core.StorageSwapper.is_possible():
            return f"torch {torch.__version__} does not say who writes to a tensor: 2.13 does"
        if self._room.budget_bytes is None:
            return '"device_budget_gib" sets no limit for this CPU'
        return ""

    def _plan(self, trace: Trace) -> SwapPart | None:
        if int(trace.live_bytes.max(initial=0)) <= self._room.budget_bytes:
            self._others_left -= 1
            return None if self._others_left >= 0 else SwapPart()
        d2h, h2d = self._device.link_rates()
        budgets = SwapBudgets(
            device_bytes=self._room.of_list(trace),
            host_bytes=self._given.host_bytes(),
            min_bytes=self._min_bytes,
            d2h_bytes_per_s=d2h,
            h2d_bytes_per_s=h2d,
        )
        seconds = self._in_force.operators_s(clock_of(trace))
        self._state = State.PLANNING
        others = _others(trace, self._given.has_regions, self._sizes_vary)
        states = self._states, self._resident
        self._beside.begin(plan_part, trace, budgets, seconds, others, self._given.layer_bytes(), *states)
        return self._planned()

    def _planned(self) -> SwapPart | None:
        """What came of planning; None: it goes on."""
        if not self._beside.is_done:
            return None
        try:
            return self._beside.take()
        except SwapError as error:
            if self._room.loosen():
                self._state = State.RECORDING
                return None
            self._tell(f"no swap list: {error}", logging.WARNING)
            return SwapPart(impossible=error.problem)


def _others(trace: Trace, of_regions: bool, of_dynamic: bool) -> frozenset[int]:
    """Tensors that are used in layers which are the token-wise technique's, or in those whose sizes depend on data."""
    taken = np.array([of_regions or (of_dynamic and layer.dynamic) for layer in trace.layers] + [False], bool)
    return frozenset(trace.uses["tensor"][taken[trace.operators["layer"][trace.uses["operator"]]]].tolist())
