"""Keep, swap or recompute: one mixed integer linear program over the operators of all regions.

MEMO (section 4.1) swaps one fraction alpha of every tensor. Here every operator has its own fraction. The program
weighs the time of copies against the time of recomputation, within the host bytes and the device bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from memplug.tokenwise.plan import memo
from memplug.tokenwise.plan.cost import (
    Amounts,
    Linear,
    Quantity,
    chosen,
    measure,
    most_in_flight_bytes,
    passes_s,
    together,
    unchosen,
)
from memplug.tokenwise.plan.idle import without_idle
from memplug.tokenwise.plan.linear_program import GAP, LinearProgram
from memplug.tokenwise.plan.model import (
    Budget,
    Group,
    InFlight,
    PlannedOperator,
    PlannedRegion,
    RegionPlan,
    TokenwisePlan,
    group_of,
    needed,
    passes_of,
)

__all__ = [
    "Budget",
    "Group",
    "InFlight",
    "PlannedOperator",
    "PlannedRegion",
    "RegionPlan",
    "TokenwisePlan",
    "full_recomputation",
    "needed",
    "solve",
]

EFFORT = 200_000
"""Limit of the whole search: columns times nodes, summed over its programs, about five seconds of a core. At the limit
the search returns the best plan so far. Unlike a time limit, it gives the same plan on every machine."""
ATTEMPTS = 4
MARGIN = 4e-6
"""Bytes by which a further attempt tightens the budgets beyond the last plan's excess, in units of `unit_bytes`."""
TIE_HOST, TIE_DEVICE = 2e-6, 1e-6
"""Weights of bytes in the objective, where time has weight 1. They break ties: of plans of equal time, the one with the
fewest host bytes wins, then the one with the fewest device bytes."""
ALL_SHARES_UP_TO = 8
"""Up to this many instances the search tries every cut into two groups; with more, only cuts from the relaxation."""


def solve(regions: Sequence[PlannedRegion], budget: Budget, alpha: float | Literal["auto"] = "auto") -> TokenwisePlan:
    """Return the plan with the shortest step, or the plan of a fixed alpha (MEMO, section 4.1).

    Inputs are swapped first, since they fill the device as sequences grow. With a fixed alpha, the outputs of
    `always_swapped` operators come next. Last comes the fraction alpha of each output that can be captured by rows
    and would otherwise be recomputed. Alpha is lowered if host memory has no room for it.

    Args:
        regions: every kind of region of the step, once each.
        budget: link rates, host bytes and device bytes.
        alpha: "auto" for the linear program, or MEMO's one fraction from 0 to 1.

    Raises:
        ValueError: alpha is outside [0, 1], a rate is not positive, two regions share a key, or an operator or backward
            asks for a storage that is neither given nor made by an earlier operator.
    """
    _check(regions, budget, alpha)
    padding_bytes = budget.padding_bytes
    inputs_bytes = sum(r.instances * (r.input_bytes + r.input_tensors * padding_bytes) for r in regions)
    inputs_swapped = inputs_bytes <= budget.host_bytes
    room_bytes = budget.host_bytes - inputs_bytes if inputs_swapped else budget.host_bytes
    if alpha != "auto":
        return memo.fixed(regions, budget, alpha, room_bytes, inputs_swapped)
    return _Search(regions, budget, inputs_swapped).best()


def full_recomputation(regions: Sequence[PlannedRegion], budget: Budget) -> TokenwisePlan:
    """Return the baseline plan: every operator is recomputed, and inputs stay on the device."""
    groups = [[group_of(region, region.instances, {}, ())] for region in regions]
    return measure(regions, groups, budget, inputs_swapped=False)


def _check(regions: Sequence[PlannedRegion], budget: Budget, alpha: float | str) -> None:
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
                raise ValueError(
                    f"{operator.name} of region {region.key!r} reads storages neither given nor made: {sorted(missing)}"
                )
            there.update(operator.outputs)
        if missing := region.saved - there:
            raise ValueError(
                f"backward of region {region.key!r} asks for storages neither given nor made: {sorted(missing)}"
            )


_Choice = tuple[int, dict[int, float], Collection[int]]
"""Number of instances in a group, swapped fractions by operator index, indices of the operators to keep."""


@dataclass(slots=True)
class _Columns:
    """The columns of one group. Each dictionary maps an operator's index to its column."""

    swap: dict[int, int] = field(default_factory=dict)
    travels: dict[int, int] = field(default_factory=dict)
    """1 if any row of the output is swapped: the whole output is on the device while it is in flight. Without this
    column, only the swapped share counts as in flight."""
    keep: dict[int, int] = field(default_factory=dict)
    run: dict[int, int] = field(default_factory=dict)
    """Fraction of the operator's rows that the recompute pass computes."""
    reads: dict[int, int] = field(default_factory=dict)
    """1 if the operator runs on any row: it then needs all rows of its inputs."""

    def amounts(self, region: PlannedRegion, budget: Budget) -> Amounts:
        """Return the amounts that these columns add to one instance."""
        operators = region.operators
        return chosen(
            budget,
            recompute_s=Linear(terms={column: operators[i].time_s for i, column in self.run.items()}),
            swapped_bytes=Linear(terms={column: operators[i].output_bytes for i, column in self.swap.items()}),
            swapped_tensors=Linear(terms={column: len(operators[i].outputs) for i, column in self.swap.items()}),
            kept_bytes=Linear(terms={column: operators[i].output_bytes for i, column in self.keep.items()}),
        )

    def sources(self, index: int) -> dict[int, float]:
        """Return the columns that make an operator's outputs available, as terms of a row."""
        return {columns[index]: 1.0 for columns in (self.swap, self.keep, self.run) if index in columns}


class _Search:
    """Searches for the best plan, by several linear programs.

    All instances of a group have the same decisions. The first program has one group for each region. Each further
    program cuts a region's instances into two groups, at another place. The relaxation of the first program is a lower
    bound for all programs, because the mean of two groups' decisions is a solution of it.
    """

    def __init__(self, regions: Sequence[PlannedRegion], budget: Budget, inputs_swapped: bool) -> None:
        self.regions = regions
        self.budget = budget
        self.inputs_swapped = inputs_swapped
        self.effort = 0
        self.live = [sorted(needed(r.operators, r.saved, r.given, ())) for r in regions]
        self.unit_s = sum(r.instances * (r.forward_s + r.backward_s) for r in regions) or 1.0
        self.unit_bytes = max(1, sum(r.instances * (r.input_bytes + self._capturable_bytes(r)) for r in regions))

    def _capturable_bytes(self, region: PlannedRegion) -> int:
        padding_bytes = self.budget.padding_bytes
        return sum(o.output_bytes + len(o.outputs) * padding_bytes for o in region.operators if o.capturable)

    def best(self) -> TokenwisePlan:
        """Return the best plan of all cuts, never worse than recomputing everything."""
        best = self._plan([[(region.instances, {}, ())] for region in self.regions])
        uncut = [(region.instances,) for region in self.regions]
        program, _ = self._program(uncut)
        relaxed = program.run(relaxed=True)
        assert relaxed.status == 0, f"recomputing everything is always possible: {relaxed.message}"
        bound_s = (relaxed.fun - TIE_HOST - TIE_DEVICE) * self.unit_s
        hints = [float(value) for value, whole in zip(relaxed.x, program.integer, strict=True) if whole]
        for cut in [uncut, *self._cuts(hints)]:
            if best.step_s <= bound_s * (1.0 + GAP) or self.effort > EFFORT:
                break
            plan = self._solve(cut)
            if plan is not None and self._objective_of(plan) < self._objective_of(best):
                best = plan
        return without_idle(self.regions, best, self.budget)

    def _objective_of(self, plan: TokenwisePlan) -> float:
        return self._objective(plan.step_s, plan.host_bytes, plan.kept_bytes)

    def _objective(self, step_s: Quantity, host_bytes: Quantity, kept_bytes: Quantity) -> Quantity:
        return step_s / self.unit_s + (TIE_HOST * host_bytes + TIE_DEVICE * kept_bytes) / self.unit_bytes

    def _cuts(self, hints: list[float]) -> list[list[tuple[int, ...]]]:
        """Return the cuts to try. A cut has each region's group sizes: (first, last), or (all,) if it is not cut.

        In one cut, the last group is the same share of every region's instances.

        Args:
            hints: values of the integer columns in the relaxation. Each is about the share of instances for which the
                column should be 1.
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

    def _plan(self, choices: list[list[_Choice]]) -> TokenwisePlan:
        groups = [
            [group_of(region, *choice) for choice in parts] for region, parts in zip(self.regions, choices, strict=True)
        ]
        return measure(self.regions, groups, self.budget, inputs_swapped=self.inputs_swapped)

    def _solve(self, cut: list[tuple[int, ...]]) -> TokenwisePlan | None:
        """Solve the program of one cut. If its plan exceeds a budget, solve a stricter program.

        A plan must not exceed a budget by a single byte. But HiGHS satisfies a row only to about 1e-6, and the program
        counts padding and bytes in flight in proportion to the swapped share of a tensor. So further attempts add a
        margin, and count each tensor in flight whole, which is slower to solve.

        Returns:
            The plan; None if no attempt finds one within the budgets.
        """
        margin, wholly = 0.0, False
        for _ in range(ATTEMPTS):
            program, columns = self._program(cut, margin, wholly)
            result = program.run()
            self.effort += len(program.cost) * max(1, result.mip_node_count or 0)
            if result.x is None:
                return None
            choices = [
                [(size, *_chosen(result.x, group)) for size, group in zip(sizes, parts, strict=True)]
                for sizes, parts in zip(cut, columns, strict=True)
            ]
            plan = self._plan(choices)
            groups = [plan.regions[region.key].groups for region in self.regions]
            buffer_bytes = self.budget.buffers * most_in_flight_bytes(self.regions, groups)
            device_bytes = plan.device_bytes + buffer_bytes
            if plan.host_bytes <= self.budget.host_bytes and device_bytes <= self.budget.device_bytes:
                return plan
            over_bytes = max(plan.host_bytes - self.budget.host_bytes, device_bytes - self.budget.device_bytes)
            if wholly or not plan.in_flight_bytes + buffer_bytes:
                margin += over_bytes / self.unit_bytes + MARGIN
            wholly = True
        return None

    def _program(
        self, cut: list[tuple[int, ...]], margin: float = 0.0, wholly: bool = False
    ) -> tuple[LinearProgram, list[list[_Columns]]]:
        program = LinearProgram(self.unit_s, self.unit_bytes)
        columns, phases = [], [Amounts(), Amounts()]
        for region, live, sizes in zip(self.regions, self.live, cut, strict=True):
            parts = [self._group(program, region, live, wholly) for _ in sizes]
            base = unchosen(region, self.budget, self.inputs_swapped)
            for phase, (group, size) in enumerate(zip(parts, sizes, strict=True)):
                one = base.plus(group.amounts(region, self.budget))
                staying = region.staying if phase == len(parts) - 1 else 0
                phases[phase] = phases[phase].plus(together(one, size, staying))
            columns.append(parts)
        first, last = phases
        host_bytes, kept_bytes = first.host_bytes + last.host_bytes, first.kept_bytes + last.kept_bytes
        program.limit(host_bytes, self.budget.host_bytes, margin)
        for in_flight_bytes in self._in_flight_bytes(program, columns):
            program.limit(kept_bytes + in_flight_bytes, self.budget.device_bytes, margin)
        step_s = sum(passes_s(first, last, self.budget, program.largest))
        for column, value in self._objective(step_s, host_bytes, kept_bytes).terms.items():
            program.cost[column] = value
        return program, columns

    def _in_flight_bytes(self, program: LinearProgram, columns: list[list[_Columns]]) -> list[Linear]:
        """Return an upper bound of the bytes in flight and in rounding buffers for each time in `Budget.in_flight`."""
        times, buffers = (*self.budget.in_flight, InFlight(0)), self.budget.buffers
        if len(times) == 1 and not buffers:
            return [Linear()]
        pieces = []
        for region, parts in zip(self.regions, columns, strict=True):
            sizes = [operator.output_bytes for operator in region.operators]
            for group in parts:
                terms = {column: sizes[index] for index, column in (group.swap | group.travels).items()}
                pieces.append(Linear(-region.safest_bytes, terms))
        most_bytes = program.largest_bytes(pieces)
        return [most_bytes * (at.count + buffers) + Linear(-at.room_bytes) for at in times]

    def _group(self, program: LinearProgram, region: PlannedRegion, live: list[int], wholly: bool) -> _Columns:
        """Add columns for a region's operators, and rows that make each required output available."""
        columns = _Columns()
        passes = passes_of(region.operators, region.given)
        splits = {operator.made_by_rows for operator in region.operators}
        for index in live:
            self._operator(program, columns, index, region.operators[index], wholly)
            if index in splits:
                columns.reads[index] = program.column(integer=True)
                program.row({columns.reads[index]: 1.0, columns.run[index]: -1.0})
            by_rows = region.operators[index].made_by_rows
            for writer in passes.makers(region.operators[index].inputs, before=index):
                asks = columns.run if writer == by_rows else columns.reads
                program.row(columns.sources(writer) | {asks[index]: -1.0})
        for writer in passes.makers(region.saved):
            program.row(columns.sources(writer), at_least=1.0)
        return columns

    def _operator(
        self, program: LinearProgram, columns: _Columns, index: int, operator: PlannedOperator, wholly: bool
    ) -> None:
        if not operator.capturable:
            columns.run[index] = columns.reads[index] = program.column(lower=float(operator.always_runs))
            return
        rows = operator.capture == "rows"
        columns.swap[index] = program.column(integer=not rows)
        if 0 < operator.output_bytes <= self.budget.device_bytes:
            columns.keep[index] = program.column(integer=True)
        columns.run[index] = columns.reads[index] = program.column()
        if rows:
            columns.reads[index] = program.column(integer=True)
            program.row({columns.reads[index]: 1.0, columns.run[index]: -1.0})
        if rows and wholly:
            columns.travels[index] = program.column(integer=True)
            program.row({columns.travels[index]: 1.0, columns.swap[index]: -1.0})


def _chosen(x: np.ndarray, columns: _Columns) -> tuple[dict[int, float], list[int]]:
    """Return the swapped fractions and the operators to keep, each by operator index.

    Fractions within the solver's tolerance of 0 or 1 are rounded.
    """
    fractions = {index: min(max(float(x[column]), 0.0), 1.0) for index, column in columns.swap.items()}
    snapped = {i: round(y) if min(y, 1.0 - y) < 1e-6 else y for i, y in fractions.items()}
    return {i: float(y) for i, y in snapped.items() if y > 0.0}, [i for i, c in columns.keep.items() if x[c] > 0.5]
