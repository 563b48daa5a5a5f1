"""Makes the layout problem of a recorded step: which requests get a planned address, and for how long.

The clock counts the step's events; a request is in use from its malloc up to its free (STWeaver, section 5).
"""

from __future__ import annotations

import numpy as np

from memplug.arena.plan.problem import BUFFER, Problem
from memplug.errors import LayoutError
from memplug.profile import trace
from memplug.profile.trace import Trace, cut, earlier_frees, freed_elsewhere, still_live
from memplug.sizes import BLOCK_BYTES, rounded_up

TRAINING = 0
"""Thread number, in a trace, of the thread that trains and of autograd's threads."""


def last_step(trace: Trace, step: int | None = None) -> Trace:
    """Return one step of a trace as a trace of its own, to plan from; see `cut`.

    Args:
        trace: any trace; one without steps counts as one step.
        step: number of the step, counted from the end if below 0; None: the last step.

    Raises:
        LayoutError: the trace has no such step.
    """
    count = max(len(trace.steps), 1)
    number = count - 1 if step is None else step
    if not -count <= number < count:
        raise LayoutError(
            f"the trace has {count} step{'' if count == 1 else 's'}, and step {number} is none of them",
            f"Choose a step from 0 to {count - 1}, or leave the choice out: the last one is taken.",
        )
    return cut(trace, number) if trace.steps else trace


def problem_of(
    step: Trace, alignment_bytes: int = BLOCK_BYTES, margin_bytes: int = 0, *, without_gradients: bool = True
) -> Problem:
    """Return the layout problem of one step: a buffer for each request above 0 bytes that is not dynamic.

    Sizes are rounded up to the alignment. A buffer that is still in use when the step ends counts as in use for all of
    the step, since the next step repeats the requests and must find the buffer's bytes untouched. The step before left
    such buffers too. If this step requests the same buffer again before it frees the earlier one, the problem has an
    extra buffer for the earlier one. A buffer that another thread freed counts as in use twice as long, since that
    thread may free it later in other steps.

    Dynamic requests are left out, since their sizes are known only at run time. Requests of threads that do not train
    are left out, since they come at any time. Traces hold no orderings of streams, so requests of different streams
    share no bytes.

    Args:
        step: one step, see `last_step`.
        alignment_bytes: above 0.
        margin_bytes: bytes that follow each buffer, to detect stray writes; a multiple of the alignment.
        without_gradients: whether requests of forwards without gradients are placed too.

    Returns:
        The problem, with buffers in the order of requests. Its clock is the index into `step.events`. Its ids are the
        requests' running numbers in the step; buffers that the step before left have -1, -2 and so on.

    Raises:
        LayoutError: more bytes than can be placed, or a stream number that is too large.
    """
    assert alignment_bytes > 0 and margin_bytes % alignment_bytes == 0, "an alignment above 0, and multiples of it"
    requests = step.requests
    placed = ~requests["dynamic"] & (requests["nbytes"] > 0) & (requests["malloc_thread"] == TRAINING)
    placed &= without_gradients | ~trace.without_gradients(step)
    requests, scaling = requests[placed], step.scaling
    largest = requests["nbytes"] if scaling is None else scaling.largest[placed]
    if (requests["stream"] > np.iinfo(BUFFER["stream"]).max).any():
        raise LayoutError(
            f"a request is on stream {requests['stream'].max()}: stream numbers must fit an int32",
            "Record the trace again.",
        )
    live = still_live(requests)
    table = np.zeros(len(requests), BUFFER)
    table["lower"] = np.where(live, 0, requests["malloc_event"])
    lower, upper = requests["malloc_event"], requests["free_event"]
    upper = np.where(freed_elsewhere(requests), np.minimum(2 * upper - lower, len(step.events)), upper)
    table["upper"] = np.where(live, len(step.events), upper)
    table["size"] = rounded_up(largest, alignment_bytes) + margin_bytes
    if scaling is not None:
        for column in ("term", "base", "factor"):
            table[column] = getattr(scaling, column)[placed]
    table["alignment"] = alignment_bytes
    table["stream"] = requests["stream"]
    for column, of_request in (("lower", "malloc"), ("upper", "free")):
        table[f"{column}_phase"] = requests[f"{of_request}_phase"]
        table[f"{column}_layer"] = requests[f"{of_request}_layer"]
    table["outlives"] = live
    left = _left_by_the_step_before(step, table, requests["malloc_event"], alignment_bytes, margin_bytes)
    return Problem(
        buffers=np.concatenate([table, left]),
        ids=np.concatenate([requests["number"], -1 - np.arange(len(left))]),
        phases=step.phases,
        layers=step.layers,
        terms=((),) if scaling is None else scaling.terms,
        fingerprint=step.fingerprint,
    )


def problem_of_all(trace: Trace, alignment_bytes: int = BLOCK_BYTES) -> Problem:
    """Return the layout problem of a whole recording, which need not be one step.

    The problem has a buffer for each request, in use from the malloc up to the free or to the end. It also has a buffer
    for each block that was in use before the recording.

    Args:
        trace: its `base_bytes` must count all blocks in use before it; frees of these blocks must carry their sizes.
        alignment_bytes: above 0; sizes are rounded up to it.

    Returns:
        The problem. Its clock is one more than the index into `trace.events`, so that earlier blocks are in use at 0.
        Ids are the requests' running numbers; earlier blocks have -1, -2 and so on.

    Raises:
        LayoutError: more bytes than can be placed, or a stream number that is too large.
    """
    requests, events, end = trace.requests, trace.events, len(trace.events) + 1
    requests = requests[requests["nbytes"] > 0]
    frees = earlier_frees(trace.events)
    frees = frees[events["nbytes"][frees] > 0]
    rest = trace.base_bytes - int(events["nbytes"][frees].sum())
    table = np.zeros(len(requests) + len(frees) + (rest > 0), BUFFER)
    for column in ("lower_phase", "upper_phase", "lower_layer", "upper_layer"):
        table[column] = -1
    asked, freed = table[: len(requests)], table[len(requests) : len(requests) + len(frees)]
    asked["lower"] = requests["malloc_event"] + 1
    asked["upper"] = np.where(still_live(requests), end, requests["free_event"] + 1)
    asked["size"], asked["stream"] = requests["nbytes"], requests["stream"]
    asked["lower_phase"], asked["lower_layer"] = requests["malloc_phase"], requests["malloc_layer"]
    freed["upper"], freed["size"], freed["stream"] = frees + 1, events["nbytes"][frees], events["stream"][frees]
    if rest > 0:
        table["upper"][-1], table["size"][-1] = end, rest
    table["size"] = rounded_up(table["size"], alignment_bytes)
    table["alignment"] = alignment_bytes
    return Problem(
        buffers=table,
        ids=np.concatenate([requests["number"], -1 - np.arange(len(table) - len(requests))]),
        phases=trace.phases,
        layers=trace.layers,
        fingerprint=trace.fingerprint,
    )


def _left_by_the_step_before(
    step: Trace, table: np.ndarray, malloc_events: np.ndarray, alignment_bytes: int, margin_bytes: int
) -> np.ndarray:
    """Return extra buffers for blocks that the step before left, of dtype BUFFER.

    The step before left blocks like those that outlive this step. If this step requests such a block again before it
    frees the earlier one, both need memory at once. Blocks of one size and stream may use each other's memory, so for
    each size and stream there must be as many buffers as blocks in use at once.
    """
    frees = earlier_frees(step.events)
    frees = frees[step.events["nbytes"][frees] > 0]
    earlier = step.events[frees]
    sizes = rounded_up(earlier["nbytes"], alignment_bytes) + margin_bytes
    rows = np.flatnonzero(table["outlives"])
    left = []
    for size, stream in np.unique(table[rows][["size", "stream"]]).tolist():
        mallocs = malloc_events[rows[(table["size"][rows] == size) & (table["stream"][rows] == stream)]]
        freed = frees[(sizes == size) & (earlier["stream"] == stream)][: len(mallocs)]
        times = np.concatenate([freed, mallocs])
        changes = np.concatenate([-np.ones(len(freed), np.int64), np.ones(len(mallocs), np.int64)])
        at_once = len(freed) + int(changes[np.argsort(times)].cumsum().max(initial=0))
        buffer = np.zeros(max(0, at_once - len(mallocs)), BUFFER)
        buffer["upper"], buffer["size"], buffer["alignment"] = len(step.events), size, alignment_bytes
        buffer["stream"], buffer["outlives"] = stream, True
        for column in ("lower_phase", "upper_phase", "lower_layer", "upper_layer"):
            buffer[column] = -1
        left.append(buffer)
    return np.concatenate([np.zeros(0, BUFFER), *left])
