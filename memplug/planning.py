"""From what the executor saw to what the planner solves, and back: the two know nothing of each other.

One step is observed at the safest setting (every matmul recomputed, attention swapped), with device times around every
operator. Its tapes become the planner's regions; the planner's groups become each region's policy. All ranks end with
the same plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

from memplug.execute import operators
from memplug.execute.frame import Frame
from memplug.execute.operators import Kind
from memplug.execute.tape import Form, Record, Tape
from memplug.execute.tokenwise import Executor, Region
from memplug.plan import tokenwise as plan

Seconds = Callable[[Any, Any], float]


class Observer:
    """Keeps the last timed tape of every region; `Executor.on_frame` calls it."""

    def __init__(self) -> None:
        self.tapes: dict[str, Tape] = {}
        self.input_bytes: dict[str, int] = {}

    def __call__(self, frame: Frame) -> None:
        """A frame's forward is over. One without times tells the planner nothing."""
        if not frame.timed:
            return
        self.tapes[frame.region.name] = frame.tape
        self.input_bytes[frame.region.name] = frame.input_bytes


def group_regions(regions: Sequence[Region], observer: Observer) -> dict[str, list[Region]]:
    """Give every observed region the key of its operator sequence: regions that ran the same operators share a plan."""
    groups: dict[str, list[Region]] = {}
    for region in regions:
        tape = observer.tapes.get(region.name)
        if tape is not None:
            region.key = f"{region.kind}:{fingerprint(tape)}"
            groups.setdefault(region.key, []).append(region)
    return groups


def fingerprint(tape: Tape) -> str:
    """Names the operator sequence and what backward asked of it; the same in every process."""
    text = ";".join(f"{record.func}{record.inputs}{record.outputs}" for record in tape.records)
    return hashlib.sha256(f"{text}|{sorted(tape.asked)}".encode()).hexdigest()[:12]


def describe(
    groups: dict[str, list[Region]], observer: Observer, executor: Executor, seconds: Seconds
) -> list[plan.Region]:
    """The planner's regions, with measured times and bytes: one per key, times are medians over its regions."""
    backward_s = _backward_seconds(observer, seconds)
    described = []
    for key, members in groups.items():
        tapes = [observer.tapes[region.name] for region in members]
        in_flight = max(1, max(executor.peak_live[region.name] for region in members))
        described.append(
            plan.Region(
                key=key,
                instances=len(members) * in_flight,
                operators=tuple(
                    _operator(tapes, index, seconds, executor.min_offload_bytes)
                    for index in range(len(tapes[0].records))
                ),
                saved=frozenset(tapes[0].asked),
                given=frozenset(tapes[0].given),
                input_bytes=max(observer.input_bytes[region.name] for region in members),
                forward_s=median(seconds(*tape.span) for tape in tapes),
                backward_s=median(backward_s[region.name] for region in members),
            )
        )
    return described


def apply(solution: plan.TokenwisePlan, groups: dict[str, list[Region]], observer: Observer) -> None:
    """Hand every region its part of the plan, from the next forward on."""
    for key, members in groups.items():
        region_plan = solution.regions.get(key)
        if region_plan is None:
            continue
        instances = sum(group.instances for group in region_plan.groups)
        for ordinal, region in enumerate(members):
            group = region_plan.group(ordinal * instances // len(members))
            records = observer.tapes[region.name].records
            captured = {index: (records[index].func, fraction, False) for index, fraction in group.fractions.items()}
            captured.update({index: (records[index].func, 1.0, True) for index in group.keep})
            region.plan = captured
            region.rows = _mean_fraction(records, group, observer.tapes[region.name])


def agree(own: tuple[list[plan.Region], plan.Budget], gather: Callable[[Any], list[Any]]) -> plan.TokenwisePlan | None:
    """One plan per set of equal regions, on every rank.

    Every rank solves with the smallest budgets of all ranks that share its set of regions, and takes the solution of
    the lowest of them.

    Args:
        own: this rank's regions and budget.
        gather: returns what every rank passed, in rank order (`all_gather_object`); called by all ranks alike.

    Returns:
        The plan; None, on every rank, where one has no regions to plan yet.
    """
    regions, budget = own
    mine = tuple(region.key for region in regions)
    everyone: list[tuple[int, tuple[str, ...], plan.Budget]] = gather((mine, budget))
    if not all(keys for keys, _ in everyone):
        return None
    budgets = [other for keys, other in everyone if keys == mine]
    first = next(rank for rank, (keys, _) in enumerate(everyone) if keys == mine)
    smallest = plan.Budget(
        d2h_bytes_per_s=min(b.d2h_bytes_per_s for b in budgets),
        h2d_bytes_per_s=min(b.h2d_bytes_per_s for b in budgets),
        host_bytes=min(b.host_bytes for b in budgets),
        device_bytes=min(b.device_bytes for b in budgets),
    )
    plans = gather(plan.solve(regions, smallest))
    return plans[first]


def _operator(tapes: list[Tape], index: int, seconds: Seconds, min_offload_bytes: int) -> plan.Operator:
    record = tapes[0].records[index]
    output_bytes = round(fmean(sum(tape.bytes[number] for number in record.outputs) for tape in tapes))
    kind = operators.kind_of(record.func)
    view = record.form is Form.VIEW
    return plan.Operator(
        name=str(record.func),
        time_s=0.0 if view else median(seconds(*tape.records[index].stamps) for tape in tapes),
        inputs=() if view else record.inputs,
        outputs=record.outputs if record.form is not Form.WRITE else record.outputs + record.inputs,
        output_bytes=output_bytes,
        capture=_capture(record, kind, output_bytes, min_offload_bytes),
        always_runs=record.form is Form.FIXED and record.root,
        always_swapped=kind is Kind.ATTENTION,
    )


def _capture(record: Record, kind: Kind | None, output_bytes: int, min_offload_bytes: int) -> str:
    if record.form is not Form.PURE or not record.capturable or output_bytes < max(1, min_offload_bytes):
        return "never"
    return "rows" if kind is Kind.ROWS else "whole"


def _mean_fraction(records: list[Record], group: plan.Group, tape: Tape) -> float:
    """For forwards that run other operators than the observed one: the plan's share of matmul output bytes."""
    matmuls = [(i, record) for i, record in enumerate(records) if operators.kind_of(record.func) is Kind.ROWS]
    sizes = {i: sum(tape.bytes[number] for number in record.outputs) for i, record in matmuls}
    total = sum(sizes.values())
    return sum(group.fractions.get(i, 0.0) * size for i, size in sizes.items()) / total if total else 0.0


def _backward_seconds(observer: Observer, seconds: Seconds) -> dict[str, float]:
    """Per region, from its first demand in backward to the next region's, without its recompute pass.

    The last one gets the median.
    """
    begun = {name: tape for name, tape in observer.tapes.items() if tape.backward_begin is not None}
    if not begun:
        return {name: 2 * seconds(*tape.span) for name, tape in observer.tapes.items()}
    origin = next(iter(begun.values())).backward_begin
    order = sorted(begun, key=lambda name: seconds(origin, begun[name].backward_begin))
    durations = {}
    for name, following in zip(order, order[1:], strict=False):
        tape = begun[name]
        recompute = seconds(*tape.recompute_span) if tape.recompute_span is not None else 0.0
        durations[name] = max(0.0, seconds(tape.backward_begin, begun[following].backward_begin) - recompute)
    fallback = median(durations.values()) if durations else 2 * median(seconds(*tape.span) for tape in begun.values())
    return {name: durations.get(name, fallback) for name in observer.tapes}
