"""Places in a trace, and titles of its pictures, in words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplug.figures.groups import BEFORE, phase_words
from memplug.profile.trace import Trace
from memplug.show.timeline import Timeline
from memplug.words import count


@dataclass(frozen=True, slots=True)
class TraceMoment:
    """The place of an event in a trace; a field is None if unknown. Before the first event all fields are None."""

    step: int | None = None  # running number; also None if the trace has one step
    event: int | None = None  # row of Trace.events
    operator: int | None = None  # row of Trace.operators
    operator_name: str | None = None  # for example "aten::mm"
    phase: str | None = None  # in words
    layer: str | None = None  # full name; None outside of layers

    def __str__(self) -> str:
        """Return words such as "step 1, backward of micro-batch 0, model.layers.31, aten::mm (operator 8,211)"."""
        if self.event is None:
            return BEFORE
        step = None if self.step is None else f"step {self.step}"
        last = f"request event {self.event:,}"
        if self.operator is not None:
            last = f"{self.operator_name} (operator {self.operator:,})"
        return ", ".join(filter(None, [step, self.phase, self.layer, last]))


def moment(trace: Trace, event: int) -> TraceMoment:
    """Return the place of an event in its trace; `event` -1 stands for the time before the first event."""
    if event < 0:
        return TraceMoment()
    row = trace.events[event]
    operator = int(row["operator"])
    begun = sum(first_event <= event for _, first_event, _ in trace.steps)
    return TraceMoment(
        step=begun - 1 if begun and len(trace.steps) > 1 else None,
        event=event,
        operator=operator if operator >= 0 else None,
        operator_name=trace.names[trace.operators["name"][operator]] if operator >= 0 else None,
        phase=phase_words(trace.phases[row["phase"]]),
        layer=trace.layers[row["layer"]].name if row["layer"] >= 0 else None,
    )


def heading(trace: Trace) -> str:
    """Return a title, for example "Memory in use: Llama, 2 recorded steps, NVIDIA H200, rank 0 of 8"."""
    fingerprint, steps = trace.fingerprint, len(trace.steps)
    recorded = count(steps, "recorded step") if steps else ""
    rank = f"rank {fingerprint.rank} of {fingerprint.world_size}" if fingerprint.world_size > 1 else ""
    parts = ", ".join(filter(None, [fingerprint.model, recorded, fingerprint.device, rank]))
    return ": ".join(filter(None, ["Memory in use", parts]))


def sampling(trace: Trace, line: Timeline) -> str:
    """Return a subtitle that says how many of the events a picture draws, and which."""
    drawn, events = len(np.unique(line.event[line.event >= 0])), len(trace.events)
    if drawn == events:
        return f"all {events:,} requests and releases"
    return f"{drawn:,} of {events:,} requests and releases: those where a stretch begins, peaks, is lowest and ends"
