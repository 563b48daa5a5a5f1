"""What a recorded training step did: operators, the tensors they used, and every request for device memory, on one
clock (Chameleon, section 4; STWeaver, section 4).

The clock is the running number of operators: an operator is named by its index in `Trace.operators`, and a request for
memory by the operator that was running. Torch-free; a trace is a file that a person can open, see `memplug show`.
This module is the whole API: rows come from `records`, what the events say of requests from `requests`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from memplug.profile.records import (
    OPERATOR,
    REQUEST,
    REQUEST_EVENT,
    TENSOR,
    USE,
    EventKind,
    Fingerprint,
    Layer,
    Pass,
    Phase,
)
from memplug.profile.requests import earlier_frees, freed_elsewhere, live_bytes, requests, still_live
from memplug.profile.trace_checks import check

__all__ = [
    "OPERATOR",
    "REQUEST",
    "REQUEST_EVENT",
    "TENSOR",
    "USE",
    "EventKind",
    "Fingerprint",
    "Layer",
    "Pass",
    "Phase",
    "Trace",
    "cut",
    "earlier_frees",
    "freed_elsewhere",
    "live_bytes",
    "requests",
    "still_live",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """One or more recorded steps. Arrays are read-only and in program order; a writeable one is copied.

    Attributes:
        fingerprint: what was recorded.
        names: operator names, such as "aten::mm".
        dtypes: names such as "bfloat16".
        phases, layers: what the columns of those names refer to.
        operators: of dtype OPERATOR.
        uses: of dtype USE: which storages each operator read and wrote; empty in a trace of requests alone.
        tensors: of dtype TENSOR: the storages.
        events: of dtype REQUEST_EVENT.
        steps: (first operator, first event, duration in seconds) of each step; a duration of 0: unknown.
        base_bytes: device memory in use when the recording began, as far as the allocator knows.
        peak_bytes: largest device memory in use, as the allocator itself counted while recording, unrounded like the
            requests; 0: unknown.

    Raises:
        TraceError: What `memplug.profile.trace_checks.check` finds: a trace that exists is well formed.
    """

    fingerprint: Fingerprint
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    phases: tuple[Phase, ...]
    layers: tuple[Layer, ...]
    operators: np.ndarray
    uses: np.ndarray
    tensors: np.ndarray
    events: np.ndarray
    steps: tuple[tuple[int, int, float], ...]
    base_bytes: int = 0
    peak_bytes: int = 0

    def __post_init__(self) -> None:
        check(self)
        for name in ("operators", "uses", "tensors", "events"):
            array = getattr(self, name)
            if array.flags.writeable:
                array = array.copy()
                array.flags.writeable = False
                object.__setattr__(self, name, array)

    @cached_property
    def requests(self) -> np.ndarray:
        """See the function `requests`; made once."""
        return requests(self.events, self.layers)

    @cached_property
    def live_bytes(self) -> np.ndarray:
        """See the function `live_bytes`; made once."""
        return live_bytes(self.events, self.base_bytes)

    def replayed_peak(self) -> tuple[int, int]:
        """The event that first reaches the most bytes in use, -1 if none exceeds the beginning; and those bytes."""
        live = self.live_bytes
        event = int(live.argmax()) if live.size else -1
        return (event, int(live[event])) if event >= 0 and live[event] > self.base_bytes else (-1, self.base_bytes)

    def replays_exactly(self) -> bool | None:
        """Whether the requests, replayed, reach the very peak that the allocator counted; None: it did not say."""
        return self.replayed_peak()[1] == self.peak_bytes if self.peak_bytes else None

    def step_operators(self, step: int) -> slice:
        """The operators of a step, which reach to the next step's or to the end; IndexError: there is no such step."""
        return self._of_step(step, 0, len(self.operators))

    def step_events(self, step: int) -> slice:
        """As `step_operators`, of `Trace.events`."""
        return self._of_step(step, 1, len(self.events))

    @cached_property
    def _first_uses(self) -> np.ndarray:
        return np.searchsorted(self.uses["operator"], np.arange(len(self.operators) + 1))

    def _of_step(self, step: int, column: int, end: int) -> slice:
        step = range(len(self.steps))[step]
        following = self.steps[step + 1][column] if step + 1 < len(self.steps) else end
        return slice(self.steps[step][column], following)


def cut(trace: Trace, step: int) -> Trace:
    """One step of a trace, as a trace: what a recording of that step alone would hold.

    Requests and tensors are numbered anew. Frees of requests from before the step become frees of request -1, with
    their size; times still count from the beginning of the recording. The allocator's own peak is unknown.

    Raises:
        IndexError: There is no such step.
    """
    inside, during = trace.step_operators(step), trace.step_events(step)
    uses = trace.uses[trace._first_uses[inside.start] : trace._first_uses[inside.stop]].copy()
    uses["operator"] -= inside.start
    tensors, uses["tensor"] = np.unique(uses["tensor"], return_inverse=True)
    events = trace.events[during].copy()
    # A thread of its own may still have been in an operator of the step before.
    events["operator"] = np.clip(events["operator"] - inside.start, -1, inside.stop - inside.start - 1)
    before = int((trace.events["kind"][: during.start] == EventKind.MALLOC).sum())
    outliving = (events["kind"] == EventKind.FREE) & (events["request"] >= 0) & (events["request"] < before)
    events["nbytes"][outliving] = trace.requests["nbytes"][events["request"][outliving]]
    events["request"] = np.maximum(events["request"] - before, -1)
    return Trace(
        fingerprint=trace.fingerprint,
        names=trace.names,
        dtypes=trace.dtypes,
        phases=trace.phases,
        layers=trace.layers,
        operators=trace.operators[inside],
        uses=uses,
        tensors=trace.tensors[tensors],
        events=events,
        steps=((0, 0, trace.steps[step][2]),),
        base_bytes=max(0, int(trace.live_bytes[during.start - 1])) if during.start else trace.base_bytes,
    )
