"""Groups operators so that each group takes about the same time, without timing any operator (Chameleon, section 5.1).

A model is layers that repeat. So if its operators are divided evenly in execution order, the groups' times vary little,
as long as a group is a layer or more. The time of a group then is the time of the step times the group's share of the
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
    """Consecutive operators of one forward, backward or optimizer.

    Attributes:
        first_operator: index into `Trace.operators`.
        operators: how many operators of the phase the group has, from `first_operator` on; at least 1.
        kind: the kind of the phase.
        micro_batch: the micro-batch of the phase, see `Phase`.
        seconds: the group's time, estimated by Eq. 1.
    """

    first_operator: int
    operators: int
    kind: Pass
    micro_batch: int
    seconds: float


def logical_layers(trace: Trace, step: int, groups: int) -> tuple[LogicalLayer, ...]:
    """Divide the forwards and the backwards of a step evenly into groups of operators.

    Args:
        trace: a trace with operators.
        step: index into `trace.steps`.
        groups: number of groups of each forward and backward of a micro-batch. In a pass with fewer operators, each
            operator is a group. The optimizer is one group. The paper finds the estimates good up to the model's number
            of layers.

    Returns:
        The groups in execution order. Operators between passes, and operators of forwards without gradients, are in no
            group, but count in Eq. 1.

    Raises:
        IndexError: there is no such step.
        TraceError: the step has operators, and its duration is unknown.
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
    """Divide operators into groups whose sizes differ by at most 1: group i is [edges[i], edges[i + 1]), none is empty.

    Returns:
        The edges, int64[groups + 1]; if there are fewer operators than `groups`, each operator is a group.

    Raises:
        ValueError: `groups` is below 1.
    """
    if groups < 1:
        raise ValueError(f"groups must be at least 1, got {groups}")
    groups = min(groups, operators)
    return np.arange(groups + 1) * operators // max(groups, 1)
