"""A swap list, and steps without tensors that match it, to test what the native core finds at each operator."""

from __future__ import annotations

from functools import cache
from typing import Any

from memplug import native
from memplug.profile.recorder import dtype_numbers
from memplug.profile.trace import Trace
from memplug.swap.plan.features import anchors, last_uses, ranks
from memplug.swap.plan.from_trace import clock_of, gaps
from memplug.swap.plan.part import SwapPart, target_of
from memplug.swap.tables import tables_of
from tests.support import extension
from tests.support.swapped import block, trace_of

Operator = tuple[int, int, list[tuple[int, int, int]], list[tuple[int, int, int]]]
"""Number, depth, inputs and outputs as (tensor, bytes, dtype)."""


@cache
def recorded(kind: str) -> Trace:
    return trace_of(kind, block(1000.0))


@cache
def listed(kind: str) -> tuple[Any, tuple[int, ...], list[list[Operator]]]:
    """Return a swap list with every gap of a step, and that step.

    Returns:
        The list's tables, the tensor of each target, and the step: for each outermost operator, a list of this operator
            and the operators inside of it.
    """
    step, core = recorded(kind), native.load()
    candidates = [each for each in gaps(step, 1) if each.nbytes >= 256]
    looks = last_uses(step, {(each.tensor, each.last_use) for each in candidates})
    targets, tensors = [], []
    for each in candidates:
        if (each.tensor, each.last_use) not in looks:
            continue
        look = looks[each.tensor, each.last_use]
        tensors.append(each.tensor)
        targets.append(target_of(step, each, look, each.last_use + 1, each.next_use))
    rank_of = ranks(step)
    part = SwapPart(
        names=step.names,
        program=tuple(step.operators["name"][clock_of(step).outermost].tolist()),
        ranks=tuple(rank_of.get(name, 0) for name in range(len(step.names))),
        targets=tuple(targets),
        anchors=tuple(anchors(step)),
    )
    tables = tables_of(part, core, dtype_numbers(core))
    return tables, tuple(tensors), groups(step, core.operator_numbers(list(step.names)), dtype_numbers(core))


def groups(step: Trace, numbers: list[int], dtypes: dict[str, int]) -> list[list[Operator]]:
    uses: dict[int, tuple[list[Any], list[Any]]] = {}
    for operator, tensor, output in step.uses.tolist():
        nbytes, dtype = step.tensors[tensor].item()
        uses.setdefault(operator, ([], []))[output].append((tensor, nbytes, dtypes[step.dtypes[dtype]]))
    found: list[list[Operator]] = []
    for index, (name, depth) in enumerate(step.operators[["name", "depth"]].tolist()):
        if depth < 0:
            continue
        if depth == 0:
            found.append([])
        found[-1].append((numbers[name], depth, *uses.get(index, ([], []))))
    return found


@cache
def rehearsal(kind: str) -> Any:
    """Return a rehearsal of the list, after two steps that were as planned."""
    tables, _, step = listed(kind)
    rehearsed = extension.load().Rehearsal(tables.program, tables.ranks, tables.targets, tables.anchors)
    for _ in range(2):
        rehearsed.run(flat(step))
    return rehearsed


def flat(step: list[list[Operator]]) -> list[Operator]:
    return [operator for group in step for operator in group]
