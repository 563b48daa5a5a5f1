"""Keep, swap or recompute: one mixed integer linear program over the operators of all regions.

MEMO (section 4.1) swaps one fraction alpha of every tensor. Here every operator has its own: bytes over the link
against the time to recompute, under the link's time in forward and in backward, host bytes and device bytes.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import csr_array

from memplug.plan import memo
from memplug.plan.tokenwise_model import (
    Budget,
    Group,
    Operator,
    Region,
    RegionPlan,
    TokenwisePlan,
    group_of,
    host_tensors,
    measure,
    needed,
)

__all__ = [
    "Budget",
    "Group",
    "Operator",
    "Region",
    "RegionPlan",
    "TokenwisePlan",
    "full_recomputation",
    "needed",
    "solve",
]

TIME_LIMIT_S = 5.0
"""For the whole search; the best plan found until then counts."""
NODE_LIMIT = 100
"""For one program: bounds the effort the same way on every machine, unlike time."""
ATTEMPTS = 4
MARGIN = 4e-6
"""To hold the budgets to the byte."""
GAP = 1e-4
"""Share of the step time within which a plan counts as optimal."""
TIE_HOST, TIE_DEVICE = 2e-6, 1e-6
"""Weights of all bytes against all time: between equal times fewer host bytes win, then fewer device bytes."""
ALL_SHARES_UP_TO = 8
"""Up to this many instances every way to cut them in two is tried, beyond only those that the relaxation hints at."""


def solve(regions: Sequence[Region], budget: Budget, alpha: float | Literal["auto"] = "auto") -> TokenwisePlan:
    """The plan with the shortest step, or the one of a fixed alpha (MEMO, section 4.1).

    Inputs are swapped first: they are what a longer sequence fills the device with. With a fixed alpha,
    `always_swapped` operators follow, then alpha of every `rows` operator that a recompute would run; an alpha that
    host memory does not hold is lowered.

    Args:
        regions: every kind of region of the step, once each.
        budget: link rates, host bytes and device bytes.
        alpha: "auto" for the program, or MEMO's one fraction from 0 to 1.

    Raises:
        ValueError: alpha outside [0, 1], a rate that is not positive, a key used twice, or a storage that is asked for
            but neither given nor made by an earlier operator.
    """
    _check(regions, budget, alpha)
    padding_bytes = budget.padding_bytes
    inputs_bytes = sum(r.instances * (r.input_bytes + r.input_tensors * padding_bytes) for r in regions)
    inputs_swapped = inputs_bytes <= budget.host_bytes
    room_bytes = budget.host_bytes - inputs_bytes if inputs_swapped else budget.host_bytes
    if alpha != "auto":
        return memo.fixed(regions, budget, alpha, room_bytes, inputs_swapped)
    return _Search(regions, budget, room_bytes, inputs_swapped).best()


def full_recomputation(regions: Sequence[Region], budget: Budget) -> TokenwisePlan:
    """What plans are compared with: every operator runs again, and the regions' inputs stay on the device."""
    groups = [[group_of(region, region.instances, {}, ())] for region in regions]
    return measure(regions, groups, budget, inputs_swapped=False)


def _check(regions: Sequence[Region], budget: Budget, alpha: float | str) -> None:
    if alpha != "auto" and not (isinstance(alpha, (int, float)) and 0.0 <= alpha <= 1.0):
        raise ValueError(f'alpha is {alpha!r}; give a number from 0 to 1, or "auto"')
    if not (budget.d2h_bytes_per_s > 0.0 and budget.h2d_bytes_per_s > 0.0):
        raise ValueError(f"link rates must be positive bytes per second, not {budget}")
    if len({region.key for region in regions}) < len(regions):
        raise ValueError("two regions share a key; merge equal regions into one with more instances")
    for region in regions:
        there = set(region.given)
        for operator in region.operators:
            if missing := set(operator.inputs) - there:
                raise ValueError(f"{operator.name} of region {region.key!r} reads {sorted(missing)}: not given or made")
            there.update(operator.outputs)
        if missing := region.saved - there:
            raise ValueError(f"backward of region {region.key!r} asks for {sorted(missing)}: not given or made")


@dataclass(slots=True)
class _Program:
    """Columns and rows of a mixed integer linear program."""

    cost: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    entries: list[tuple[int, int, float]] = field(default_factory=list)
    at_least: list[float] = field(default_factory=list)

    def column(self, *, lower: float = 0.0, upper: float = 1.0, cost: float = 0.0, integer: bool = False) -> int:
        self.cost.append(cost)
        self.lower.append(lower)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def row(self, terms: dict[int, float], at_least: float = 0.0) -> None:
        """Sum of coefficient times column >= at_least."""
        self.entries += [(len(self.at_least), column, value) for column, value in terms.items()]
        self.at_least.append(at_least)

    def run(self, time_limit_s: float, *, relaxed: bool = False) -> OptimizeResult:
        rows, columns, values = zip(*self.entries, strict=True)
        matrix = csr_array((values, (rows, columns)), shape=(len(self.at_least), len(self.cost)))
        return milp(
            np.array(self.cost),
            integrality=None if relaxed else np.array(self.integer, dtype=int),
            bounds=Bounds(self.lower, self.upper),
            constraints=LinearConstraint(matrix, lb=np.array(self.at_least)),
            options={"time_limit": time_limit_s, "node_limit": NODE_LIMIT, "mip_rel_gap": GAP},
        )


_Choice = tuple[int, dict[int, float], Collection[int]]
"""Instances of a group, the fractions they swap, the operators whose outputs they keep."""


@dataclass(slots=True)
class _Columns:
    """Columns of one group: operator index -> column."""

    swap: dict[int, int] = field(default_factory=dict)
    keep: dict[int, int] = field(default_factory=dict)
    run: dict[int, int] = field(default_factory=dict)
    """Fraction of the operator that runs."""
    reads: dict[int, int] = field(default_factory=dict)
    """1 if any of it runs: its inputs are then needed whole."""

    def sources(self, index: int) -> dict[int, float]:
        """What makes an operator's outputs available, as the left side of a row."""
        return {columns[index]: 1.0 for columns in (self.swap, self.keep, self.run) if index in columns}


class _Search:
    """All programs for one problem.

    A whole operator, or one that is kept, is so for all instances of a group. One group for each region is tried
    first, then two, cut at several places; the relaxation of the first program bounds all of them from below, because
    the mean of two groups is a solution of it.
    """

    def __init__(self, regions: Sequence[Region], budget: Budget, room_bytes: int, inputs_swapped: bool) -> None:
        self.regions = regions
        self.budget = budget
        self.room_bytes = room_bytes
        self.inputs_swapped = inputs_swapped
        self.deadline = time.monotonic() + TIME_LIMIT_S
        self.live = [sorted(needed(r.operators, r.saved, r.given, ())) for r in regions]
        self.unit_s = sum(r.instances * (r.forward_s + r.backward_s) for r in regions) or 1.0
        self.unit_bytes = max(1, sum(r.instances * (r.input_bytes + self._capturable_bytes(r)) for r in regions))

    @staticmethod
    def _capturable_bytes(region: Region) -> int:
        return sum(operator.output_bytes for operator in region.operators if operator.capturable)

    def best(self) -> TokenwisePlan:
        """The best plan over all cuts, and never worse than recomputing everything."""
        best = self._plan([[(region.instances, {}, ())] for region in self.regions])
        uncut = [(region.instances,) for region in self.regions]
        program, _ = self._program(uncut)
        relaxed = program.run(TIME_LIMIT_S, relaxed=True)
        assert relaxed.status == 0, f"recomputing everything is always possible: {relaxed.message}"
        bound_s = (relaxed.fun - TIE_HOST - TIE_DEVICE) * self.unit_s
        hints = [float(value) for value, whole in zip(relaxed.x, program.integer, strict=True) if whole]
        for cut in [uncut, *self._cuts(hints)]:
            if best.step_s <= bound_s * (1.0 + GAP) or time.monotonic() > self.deadline:
                break
            plan = self._solve(cut)
            if plan is not None and self._rank(plan) < self._rank(best):
                best = plan
        return self._without_idle(best)

    def _rank(self, plan: TokenwisePlan) -> float:
        ties = TIE_HOST * plan.host_bytes + TIE_DEVICE * plan.device_bytes
        return plan.step_s / self.unit_s + ties / self.unit_bytes

    def _cuts(self, hints: list[float]) -> list[list[tuple[int, ...]]]:
        """Sizes of the two groups of each region, the same share of each region in the last group.

        A hint is a yes or no that the relaxation answers by a fraction: the share of instances that want a yes.
        """
        most = max((region.instances for region in self.regions), default=1)
        lasts = set(range(1, most))
        if most > ALL_SHARES_UP_TO:
            at = {round(share * most, 3) for hint in hints for share in (hint, 1.0 - hint)}
            lasts &= {int(last) + up for last in at for up in (0, 1)}
        return [[self._sizes(region.instances, last / most) for region in self.regions] for last in sorted(lasts)]

    @staticmethod
    def _sizes(instances: int, share: float) -> tuple[int, ...]:
        last = min(round(share * instances), instances - 1)
        return (instances - last, last) if last else (instances,)

    def _without_idle(self, plan: TokenwisePlan) -> TokenwisePlan:
        """The plan less what is swapped or kept for no gain: the solver stops within a gap, ties are below it."""
        choices = [[(g.instances, g.fractions, g.keep) for g in plan.regions[r.key].groups] for r in self.regions]
        for parts in choices:
            for at, (size, fractions, keep) in enumerate(parts):
                for index in (*fractions, *sorted(keep)):
                    before = parts[at]
                    parts[at] = (size, {i: y for i, y in before[1].items() if i != index}, before[2] - {index})
                    thinner = self._plan(choices)
                    if thinner.step_s <= plan.step_s:
                        plan = thinner
                    else:
                        parts[at] = before
        return plan

    def _plan(self, choices: list[list[_Choice]]) -> TokenwisePlan:
        groups = [
            [group_of(region, *choice) for choice in parts] for region, parts in zip(self.regions, choices, strict=True)
        ]
        return measure(self.regions, groups, self.budget, inputs_swapped=self.inputs_swapped)

    def _solve(self, cut: list[tuple[int, ...]]) -> TokenwisePlan | None:
        """HiGHS holds a row to about 1e-6, and takes a share of a tensor for a share of its padding; a plan has to hold
        its budgets to the byte, if need be by a margin.
        """
        margin = 0.0
        for _ in range(ATTEMPTS):
            program, columns = self._program(cut, margin)
            result = program.run(max(self.deadline - time.monotonic(), 0.1))
            if result.x is None:
                return None
            choices = [
                [(size, *_chosen(result.x, group)) for size, group in zip(sizes, parts, strict=True)]
                for sizes, parts in zip(cut, columns, strict=True)
            ]
            plan = self._plan(choices)
            if plan.host_bytes <= self.budget.host_bytes and plan.device_bytes <= self.budget.device_bytes:
                return plan
            over_bytes = max(plan.host_bytes - self.budget.host_bytes, plan.device_bytes - self.budget.device_bytes)
            margin += over_bytes / self.unit_bytes + MARGIN
        return None

    def _program(self, cut: list[tuple[int, ...]], margin: float = 0.0) -> tuple[_Program, list[list[_Columns]]]:
        program = _Program()
        columns = [
            [self._group(program, region, live, size) for size in sizes]
            for region, live, sizes in zip(self.regions, self.live, cut, strict=True)
        ]
        self._budgets(program, columns, cut, margin)
        return program, columns

    def _group(self, program: _Program, region: Region, live: list[int], size: int) -> _Columns:
        """Columns of the operators, and the rows that make every output that is asked for available."""
        columns = _Columns()
        writers: dict[int, list[int]] = {}
        for index in live:
            operator = region.operators[index]
            self._operator(program, columns, index, operator, size)
            for writer in sorted({w for s in operator.inputs if s not in region.given for w in writers[s]}):
                program.row(columns.sources(writer) | {columns.reads[index]: -1.0})
            for storage in operator.outputs:
                writers.setdefault(storage, []).append(index)
        for writer in sorted({w for s in region.saved - region.given for w in writers[s]}):
            program.row(columns.sources(writer), at_least=1.0)
        return columns

    def _operator(self, program: _Program, columns: _Columns, index: int, operator: Operator, size: int) -> None:
        if not operator.capturable:
            columns.run[index] = columns.reads[index] = program.column(lower=float(operator.always_runs))
            return
        rows, weight = operator.capture == "rows", size * operator.output_bytes / self.unit_bytes
        columns.swap[index] = program.column(cost=TIE_HOST * weight, integer=not rows)
        if 0 < operator.output_bytes <= self.budget.device_bytes:
            columns.keep[index] = program.column(cost=TIE_DEVICE * weight, integer=True)
        columns.run[index] = columns.reads[index] = program.column()
        if rows:
            columns.reads[index] = program.column(integer=True)
            program.row({columns.reads[index]: 1.0, columns.run[index]: -1.0})

    def _budgets(
        self, program: _Program, columns: list[list[_Columns]], cut: list[tuple[int, ...]], margin: float
    ) -> None:
        """Columns of the objective; rows of the budgets and of the time model, as in `measure`."""
        run, link, kept = ([{}, {}] for _ in range(3))
        padding: dict[int, float] = {}
        padding_bytes = self.budget.padding_bytes
        forward, backward, inputs = ([0.0, 0.0] for _ in range(3))
        for region, parts, sizes in zip(self.regions, columns, cut, strict=True):
            for phase, (group, size) in enumerate(zip(parts, sizes, strict=True)):
                seconds, share = size / self.unit_s, size / self.unit_bytes
                forward[phase] += (region.forward_s + region.overhead_forward_s) * seconds
                backward[phase] += (region.backward_s + region.overhead_backward_s) * seconds
                inputs[phase] += region.input_bytes * share * self.inputs_swapped
                run[phase] |= {c: -region.operators[i].time_s * seconds for i, c in group.run.items()}
                link[phase] |= {c: -region.operators[i].output_bytes * share for i, c in group.swap.items()}
                padding |= {c: -padding_bytes * host_tensors(region, [i]) * share for i, c in group.swap.items()}
                kept[phase] |= {c: -region.operators[i].output_bytes * share for i, c in group.keep.items()}
        room, device = self.room_bytes / self.unit_bytes, self.budget.device_bytes / self.unit_bytes
        link_and_padding = {c: value + padding[c] for c, value in (link[0] | link[1]).items()}
        program.row(link_and_padding, at_least=min(margin - room, 0.0))
        program.row(kept[0] | kept[1], at_least=min(margin - device, 0.0))
        for compute, recompute, rate in (
            (forward, ({}, {}), self.budget.d2h_bytes_per_s),
            (backward, run, self.budget.h2d_bytes_per_s),
        ):
            rate *= self.unit_s / self.unit_bytes
            early, total = program.column(upper=np.inf), program.column(upper=np.inf, cost=1.0)
            program.row({early: 1.0} | recompute[0], at_least=compute[0])
            program.row({total: 1.0, early: -1.0} | recompute[1], at_least=compute[1])
            program.row({total: 1.0, early: -1.0} | _scaled(link[1], 1.0 / rate), at_least=inputs[1] / rate)
            program.row({early: 1.0} | _scaled(link[0] | kept[0], 1.0 / rate), at_least=(inputs[0] - device) / rate)
            program.row({total: 1.0} | _scaled(link[0] | link[1], 1.0 / rate), at_least=sum(inputs) / rate)


def _scaled(terms: dict[int, float], by: float) -> dict[int, float]:
    return {column: value * by for column, value in terms.items()}


def _chosen(x: np.ndarray, columns: _Columns) -> tuple[dict[int, float], list[int]]:
    """Fractions and kept operators, freed from the solver's tolerance."""
    fractions = {index: min(max(float(x[column]), 0.0), 1.0) for index, column in columns.swap.items()}
    snapped = {i: round(y) if min(y, 1.0 - y) < 1e-6 else y for i, y in fractions.items()}
    return {i: float(y) for i, y in snapped.items() if y > 0.0}, [i for i, c in columns.keep.items() if x[c] > 0.5]
