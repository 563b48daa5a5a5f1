"""The swap list as a part of a plan: the tensors that it names, when they are swapped, and its predictions."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from memplug.errors import SwapError
from memplug.plans.schema import PlanPart
from memplug.profile.trace import Trace
from memplug.sizes import GIB, HOST_ROW_BYTES, rounded_up
from memplug.swap.judge import JudgedSwap, ListLimits, mistakes_of_swaps
from memplug.swap.plan.features import Features, TensorUse, anchors, last_uses, ranks
from memplug.swap.plan.from_trace import LinkLoad, clock_of, even_s, marks, outside_of, swap_problem
from memplug.swap.plan.other_copies import busy_s
from memplug.swap.plan.policy import swap_list
from memplug.swap.plan.problem import FROM_THE_BEGINNING, Candidate, OverBudgetError

FROM_BEFORE = (TensorUse(FROM_THE_BEGINNING, 0, False, 0, Features()), 0)
"""In place of an entry of `last_uses`, for a tensor that is offloaded as the step begins, so has no last use."""
_UNPREDICTED = {"predicted_peak_bytes": 0, "predicted_stall_s": 0.0, "predicted_step_s": 0.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A tensor that is swapped between two uses. A place is the running number of an outermost operator.

    Attributes:
        nbytes, dtype: bytes of its storage, and dtype of the first tensor seen in the storage.
        operator: name of the operator that uses it last before it leaves.
        output, slot: whether it is an output or an input of that operator, and its number among these.
        uses, kinds, recent: see `memplug.swap.plan.features`.
        tolerance: the most places by which its last use may be off.
        last_use, release, prefetch, next_use: places. The tensor is offloaded after `last_use`, its memory is free for
            [release, prefetch), and it is back at `next_use`. See `Candidate` for uses before and after the program.
        key: for a tensor that is offloaded as the step begins, the key of the anchor that identifies it (see
            `memplug.swap.plan.features.anchors`), since it has no features yet; else -1.
    """

    nbytes: int
    dtype: str
    operator: str
    output: bool
    slot: int
    uses: int
    kinds: int
    recent: int
    tolerance: int
    last_use: int
    release: int
    prefetch: int
    next_use: int
    key: int = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapPart(PlanPart):
    """The swap list of one program.

    Attributes:
        names: names of operators.
        program: the outermost operators in order, as indices into `names`.
        outside: (place, operators) for each run of operators outside of the program that has anchors. `place` is the
            place of the program's operator before the run. `operators` are indices into `names`, up to the run's last
            anchor.
        ranks: frequency rank of each name, see `memplug.swap.plan.features.ranks`; 0: the program does not run it.
        targets: tensors to swap, sorted by last use; empty if the step fits without a list, or no list suffices.
        anchors: (place, slot, tensor), see `memplug.swap.plan.features.anchors`. Places from the program's length on
            stand for the operators of `outside`, in their order; see `memplug.swap.plan.from_trace.marks`.
        host_bytes: the host memory for all targets together.
        predicted_peak_bytes, predicted_stall_s, predicted_step_s: predictions for a step under the list.
        impossible: why no list keeps to the budgets; "" if one does, or none is needed.
    """

    name = "swap"
    names: tuple[str, ...] = ()
    program: tuple[int, ...] = ()
    outside: tuple[tuple[int, tuple[int, ...]], ...] = ()
    ranks: tuple[int, ...] = ()
    targets: tuple[Target, ...] = ()
    anchors: tuple[tuple[int, int, int], ...] = ()
    host_bytes: int = 0
    predicted_peak_bytes: int = 0
    predicted_stall_s: float = 0.0
    predicted_step_s: float = 0.0
    impossible: str = ""

    @property
    def swapped_bytes(self) -> int:
        """Return the bytes that are swapped in a step."""
        return sum(target.nbytes for target in self.targets)

    @property
    def state_bytes(self) -> int:
        """Return the swapped bytes that are offloaded as the step begins."""
        return sum(target.nbytes for target in self.targets if target.last_use == FROM_THE_BEGINNING)

    def does_as(self, other: SwapPart) -> bool:
        """Return whether both lists swap the same tensors at the same places of the same program."""
        one, its = (dataclasses.replace(each, **_UNPREDICTED) for each in (self, other))
        return one == its


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapBudgets:
    """The resources that a list may use.

    Attributes:
        device_bytes, host_bytes: see `SwapProblem`.
        min_bytes: size of the smallest tensor to swap.
        d2h_bytes_per_s, h2d_bytes_per_s: rates of the link, while both directions run.
    """

    device_bytes: int
    host_bytes: int
    min_bytes: int
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float


def plan_part(
    step: Trace,
    budgets: SwapBudgets,
    operator_s: np.ndarray | None = None,
    others: Collection[int] = (),
    layer_bytes: Mapping[str, int] | None = None,
    states: bool = False,
    resident: Collection[int] = (),
) -> SwapPart:
    """Plan the swap list of a recorded step, and return it as a part.

    Args:
        step: one step with tensors.
        budgets: see `SwapBudgets`.
        operator_s: see `swap_problem`.
        others: see `swap_problem`.
        layer_bytes: bytes that other copies move, see `busy_s`.
        states: see `swap_problem`.
        resident: see `swap_problem`.

    Raises:
        SwapError: no list keeps to the budgets; the message says what is possible, and which operator is the obstacle.
        ValueError: the judge refuses the list: a defect of memplug.
    """
    clock, rates = clock_of(step), (budgets.d2h_bytes_per_s, budgets.h2d_bytes_per_s)
    operator_s = even_s(step) if operator_s is None else operator_s
    busy = busy_s(step, np.concatenate(([0.0], operator_s.cumsum())), layer_bytes or {}, *rates)
    problem = swap_problem(
        step,
        LinkLoad(*rates, *busy),
        budget_bytes=budgets.device_bytes,
        host_bytes=budgets.host_bytes,
        min_bytes=budgets.min_bytes,
        operator_s=operator_s,
        others=others,
        states=states,
        resident=resident,
    )
    looks = last_uses(step, {(each.tensor, each.last_use) for each in problem.candidates})
    looks |= {
        (each.tensor, each.last_use): FROM_BEFORE for each in problem.candidates if each.last_use == FROM_THE_BEGINNING
    }
    told_apart = tuple(each for each in problem.candidates if (each.tensor, each.last_use) in looks)
    problem = dataclasses.replace(problem, candidates=told_apart)
    try:
        found = swap_list(problem)
    except OverBudgetError as error:
        raise _impossible(error, step, budgets) from None
    placed = [(problem.candidates[swap.candidate], swap) for swap in found.swaps]
    rank_of = ranks(step)
    targets = []
    for candidate, swap in placed:
        look = looks[candidate.tensor, candidate.last_use]
        targets.append(target_of(step, candidate, look, swap.release, swap.prefetch))
    seconds = np.diff(problem.begin_s)
    mistakes = mistakes_of_swaps(
        [
            JudgedSwap(each.tensor, each.nbytes, each.last_use, swap.release, swap.prefetch, each.next_use)
            for each, swap in placed
        ],
        step,
        ListLimits(
            budgets.device_bytes,
            budgets.host_bytes,
            budgets.d2h_bytes_per_s,
            budgets.h2d_bytes_per_s,
            found.simulation.stall_s,
            seconds,
            problem.d2h_busy_s,
            problem.h2d_busy_s,
            others,
        ),
    )
    if wrong := next(mistakes, ""):
        raise ValueError(wrong)
    aligned = (rounded_up(target.nbytes, HOST_ROW_BYTES) for target in targets)
    outside, marked = _marked(step, {target.key for target in targets})
    return SwapPart(
        names=step.names,
        program=tuple(step.operators["name"][clock.outermost].tolist()),
        ranks=tuple(rank_of.get(name, 0) for name in range(len(step.names))),
        targets=tuple(sorted(targets, key=lambda target: target.last_use)),
        outside=outside,
        anchors=(*anchors(step), *marked),
        host_bytes=sum(aligned),
        predicted_peak_bytes=int(found.simulation.in_use_bytes.max(initial=0)),
        predicted_stall_s=found.simulation.stall_s,
        predicted_step_s=found.simulation.step_s,
    )


def _marked(
    step: Trace, keys: Collection[int]
) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], list[tuple[int, int, int]]]:
    """Return `SwapPart.outside` and the anchors in it; `keys` are the tensors that leave as the step begins."""
    place, outside, anchors_there = clock_of(step).ticks, [], []
    for after, group in itertools.groupby(
        (mark for mark in marks(step) if mark.tensor in keys), lambda mark: mark.after
    ):
        found = list(group)
        anchors_there += ((place + mark.number, mark.slot, mark.tensor) for mark in found)
        outside.append((after, tuple(outside_of(step, after)[: found[-1].number + 1])))
        place += found[-1].number + 1
    return tuple(outside), anchors_there


def target_of(step: Trace, candidate: Candidate, look: tuple[TensorUse, int], release: int, prefetch: int) -> Target:
    """Return the target of a candidate that is away for [release, prefetch); `look` is its entry of `last_uses`."""
    use, tolerance = look
    return Target(
        nbytes=candidate.nbytes,
        dtype=step.dtypes[step.tensors["dtype"][candidate.tensor]],
        operator="" if candidate.last_use == FROM_THE_BEGINNING else step.names[use.name],
        output=use.output,
        slot=use.slot,
        **use.features._asdict(),
        tolerance=tolerance,
        last_use=candidate.last_use,
        release=release,
        prefetch=prefetch,
        next_use=candidate.next_use,
        key=candidate.tensor if candidate.last_use == FROM_THE_BEGINNING else -1,
    )


def _impossible(error: OverBudgetError, step: Trace, budgets: SwapBudgets) -> SwapError:
    least, clock = error.least, clock_of(step)
    what = "code after the backward, such as the optimizer,"
    if least.operator < clock.ticks:
        name = step.names[step.operators["name"][clock.outermost[least.operator]]]
        what = f"operator {least.operator:,} ({name})"
    device_gib, host_gib, least_gib = (
        f"{nbytes / GIB:.3g} GiB" for nbytes in (budgets.device_bytes, budgets.host_bytes, least.nbytes)
    )
    if error.host_limited:
        return SwapError(
            f"{host_gib} of host memory are too little to keep a step to {device_gib} of the device; with more host "
            f"memory, a step could keep to {least_gib}",
            'Raise "host_budget_gib", or "device_budget_gib"; or let a step take less.',
            code="MP015",
        )
    return SwapError(
        f"{device_gib} of the device are too little: {what} takes {least_gib} with all possible tensors swapped",
        f'Set "device_budget_gib" to {least.nbytes / GIB:.3g} or more; or lower "swap.min_bytes", or let a step take '
        "less: a shorter sequence, a smaller micro-batch.",
        code="MP015",
    )
