"""The layout problem of a recorded training step: which of its requests get a planned address, and for how long.

The clock is that of the step's events, so a request is in use from its malloc up to its free (STWeaver, section 5).
"""

from __future__ import annotations

import numpy as np

from memplug.errors import LayoutError
from memplug.plan.layout.problem import BUFFER, Problem
from memplug.profile.trace import Trace, cut, still_live

GRANULARITY_BYTES = 512
"""What torch's CUDA allocator rounds every request up to (c10/cuda/CUDACachingAllocator, kMinBlockSize)."""


def last_step(trace: Trace, step: int | None = None) -> Trace:
    """The step of a trace that a plan is made from, as a trace of its own; see `cut`.

    Args:
        trace: One without steps counts as one step.
        step: Running number, from the end if below 0; None: the last one.

    Raises:
        LayoutError: The trace has no such step.
    """
    count = max(len(trace.steps), 1)
    number = count - 1 if step is None else step
    if not -count <= number < count:
        raise LayoutError(
            f"the trace has {count} step{'' if count == 1 else 's'}, and step {number} is none of them",
            f"Choose a step from 0 to {count - 1}, or leave the choice out: the last one is taken.",
        )
    return cut(trace, number) if trace.steps else trace


def problem_of(step: Trace, alignment_bytes: int = GRANULARITY_BYTES) -> Problem:
    """What is to be placed of one step: a buffer for each static request that asks for any bytes, in their order.

    Sizes are rounded up to the alignment, as an allocator of that granularity hands them out. What is still in use
    when the step ends is in use all of the step: the next one, in which all happens again, must find its bytes
    untouched. Dynamic requests are left out: their sizes are known at run time. Traces hold no orderings of streams,
    so requests of different streams share no bytes.

    Args:
        step: One step, see `last_step`.
        alignment_bytes: Above 0.

    Returns:
        Its clock is the index into `step.events`, its ids are the requests' running numbers in the step.

    Raises:
        LayoutError: More bytes than can be placed, or more streams than there can be.
    """
    assert alignment_bytes > 0, "an alignment above 0"
    requests = step.requests[~step.requests["dynamic"] & (step.requests["nbytes"] > 0)]
    if (requests["stream"] > np.iinfo(BUFFER["stream"]).max).any():
        raise LayoutError(
            f"a request is on stream {requests['stream'].max()}: streams have running numbers",
            "Record the trace again.",
        )
    live = still_live(requests)
    table = np.zeros(len(requests), BUFFER)
    table["lower"] = np.where(live, 0, requests["malloc_event"])
    table["upper"] = np.where(live, len(step.events), requests["free_event"])
    table["size"] = -(-requests["nbytes"] // alignment_bytes) * alignment_bytes
    table["alignment"] = alignment_bytes
    table["stream"] = requests["stream"]
    for column, of_request in (("lower", "malloc"), ("upper", "free")):
        table[f"{column}_phase"] = requests[f"{of_request}_phase"]
        table[f"{column}_layer"] = requests[f"{of_request}_layer"]
    table["outlives"] = live
    return Problem(
        buffers=table,
        ids=requests["number"].copy(),
        phases=step.phases,
        layers=step.layers,
        fingerprint=step.fingerprint,
    )
