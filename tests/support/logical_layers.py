"""Groups of operators that take about the same time, without timing a single one (Chameleon, 5.1).

A model is layers that repeat, so its operators, divided evenly in execution order, give groups whose times vary little
as long as a group is a layer or more. The time of a group then follows from the time of the step and its share of the
operators (Eq. 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplug.errors import TraceError
from memplug.profile.records import Pass
from memplug.profile.trace import Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class LogicalLayer:
    """Operators of one forward, backward or optimizer in a row.

    Attributes:
        first_operator: index into `Trace.operators`.
        operators: how many of its phase it has, from that one on; at least 1.
        kind: of its phase.
        micro_batch: of its phase, see `Phase`.
        seconds: estimated, by Eq. 1.
    """

    first_operator: int
    operators: int
    kind: Pass
    micro_batch: int
    seconds: float


def logical_layers(trace: Trace, step: int, groups: int) -> tuple[LogicalLayer, ...]:
    """Divides the forwards and the backwards of a step evenly into groups of operators.

    Args:
        trace: A trace with operators.
        step: Index into `trace.steps`.
        groups: Of each forward, and of each backward, of a micro-batch; one with fewer operators has a group for each.
            The paper finds the estimates good up to the number of layers of the model. The optimizer is one group.

    Returns:
        In execution order. Operators between passes, and of forwards without gradients, are in none of them, but count
        in Eq. 1.

    Raises:
        IndexError: There is no such step.
        TraceError: The step has operators, and its duration is unknown.
        ValueError: `groups` is below 1.
    """
    inside = trace.step_operators(step)
    phase = trace.operators["phase"][inside]
    seconds = trace.steps[step][2]
    if len(phase) and not seconds:
        raise TraceError(f"the duration of step {step} of this trace is unknown", "Use a step that was recorded whole.")
    layers = []
    for index in np.unique(phase).tolist():
        kind, micro_batch = trace.phases[index].kind, trace.phases[index].micro_batch
        if kind in (Pass.OTHER, Pass.NO_GRAD):
            continue
        members = np.flatnonzero(phase == index)
        edges = group_edges(len(members), 1 if kind == Pass.OPTIMIZER else groups)
        layers += [
            LogicalLayer(
                first_operator=inside.start + int(members[first]),
                operators=int(size),
                kind=kind,
                micro_batch=micro_batch,
                seconds=seconds / len(phase) * int(size),
            )
            for first, size in zip(edges[:-1], np.diff(edges), strict=True)
        ]
    return tuple(sorted(layers, key=lambda layer: layer.first_operator))


def group_edges(operators: int, groups: int) -> np.ndarray:
    """Divides operators evenly, sizes differ by 1 at most: group i is [edges[i], edges[i + 1]), none is empty.

    Returns:
        int64, one more than there are groups; with fewer operators than `groups` there is one group for each.

    Raises:
        ValueError: `groups` is below 1.
    """
    if groups < 1:
        raise ValueError(f"groups must be at least 1, got {groups}")
    groups = min(groups, operators)
    return np.arange(groups + 1) * operators // max(groups, 1)
