"""A recorded training step: operators, the tensors that they used, and every request for device memory, on one clock.

See Chameleon, section 4, and STWeaver, section 4. The clock counts operators: an operator's time is its index in
`Trace.operators`, and the time of a request for memory is that of the operator that was running. This module imports no
torch, and also exports names from `records` and `requests`. `memplug show` displays a trace file.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

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
from memplug.profile.scaling import Scaling
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
    "without_gradients",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """One or more recorded steps. Arrays are read-only and in program order; writeable ones are copied.

    Attributes:
        fingerprint: the job and inputs of the recording.
        names: operator names, such as "aten::mm".
        dtypes: names such as "bfloat16".
        phases: the phases that the columns called `phase` refer to.
        layers: the layers that the columns called `layer` refer to.
        operators: OPERATOR[operators].
        uses: USE[uses]: the storages that each operator read and wrote; empty if only requests were recorded.
        tensors: TENSOR[tensors]: the storages.
        events: REQUEST_EVENT[events].
        steps: (first operator, first event, duration in seconds) of each step; the duration is 0 if unknown.
        base_bytes: device memory in use when the recording began, as far as the allocator knows.
        peak_bytes: the most device memory in use during the recording, as the allocator itself counted it, in
            requested (unrounded) bytes; 0 if unknown.
        dynamic: bool[requests], the requests that differ in other steps (`memplug.profile.varying`); None: no other
            step was compared, and the requests of dynamic layers count as dynamic. Trace files do not contain it.
        scaling: how the bytes of the requests follow from the inputs' sizes; None: all steps compared had inputs of the
            same sizes. Trace files do not contain it.

    Raises:
        TraceError: the trace is malformed (`memplug.profile.trace_checks.check`).
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
    dynamic: np.ndarray | None = None
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        """Check the trace, and copy writeable arrays into read-only ones."""
        check(self)
        for name in ("operators", "uses", "tensors", "events"):
            array = getattr(self, name)
            if array.flags.writeable:
                array = array.copy()
                array.flags.writeable = False
                object.__setattr__(self, name, array)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is computed again when it is asked for."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def requests(self) -> np.ndarray:
        """Return the requests of the events, REQUEST[requests], read-only; computed once."""
        return requests(self.events, self.layers, self.dynamic)

    @cached_property
    def live_bytes(self) -> np.ndarray:
        """Return the bytes in use after each event, int64[events], read-only; computed once."""
        return live_bytes(self.events, self.base_bytes)

    def replayed_peak(self) -> tuple[int, int]:
        """Return the index of the event that first reaches the peak, and the peak in bytes.

        The index is -1 if no event exceeds `base_bytes`.
        """
        live = self.live_bytes
        event = int(live.argmax()) if live.size else -1
        return (event, int(live[event])) if event >= 0 and live[event] > self.base_bytes else (-1, self.base_bytes)

    def replays_exactly(self) -> bool | None:
        """Return whether the replayed requests reach exactly `peak_bytes`; None if `peak_bytes` is unknown."""
        return self.replayed_peak()[1] == self.peak_bytes if self.peak_bytes else None

    def step_operators(self, step: int) -> slice:
        """Return a step's slice of `operators`; raise IndexError if there is no such step."""
        return self._of_step(step, 0, len(self.operators))

    def step_events(self, step: int) -> slice:
        """Return a step's slice of `events`; raise IndexError if there is no such step."""
        return self._of_step(step, 1, len(self.events))

    @cached_property
    def _first_uses(self) -> np.ndarray:
        return np.searchsorted(self.uses["operator"], np.arange(len(self.operators) + 1))

    def _of_step(self, step: int, column: int, end: int) -> slice:
        step = range(len(self.steps))[step]
        following = self.steps[step + 1][column] if step + 1 < len(self.steps) else end
        return slice(self.steps[step][column], following)


def without_gradients(trace: Trace) -> np.ndarray:
    """Return which requests a forward without gradients makes, such as a validation's. bool[requests]."""
    phases = [number for number, phase in enumerate(trace.phases) if phase.kind is Pass.NO_GRAD]
    return np.isin(trace.requests["malloc_phase"], phases)


def cut(trace: Trace, step: int) -> Trace:
    """Return one step of a trace as a trace, as if only that step had been recorded.

    Requests and tensors get new numbers, from 0. A free of an earlier step's request becomes a free of request -1, with
    the request's size. Times still count from the beginning of the recording. `peak_bytes` is unknown.

    Raises:
        IndexError: there is no such step.
    """
    inside, during = trace.step_operators(step), trace.step_events(step)
    uses = trace.uses[trace._first_uses[inside.start] : trace._first_uses[inside.stop]].copy()
    uses["operator"] -= inside.start
    tensors, uses["tensor"] = np.unique(uses["tensor"], return_inverse=True)
    events = trace.events[during].copy()
    # another thread's event may still belong to an operator of the step before
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
