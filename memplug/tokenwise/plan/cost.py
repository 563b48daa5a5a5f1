"""The cost model of a plan (MEMO, section 4.1): the same formulas for numbers and for linear programs.

Bytes and compute times (`Amounts`) are linear in the decisions. The time of a pass is the largest of several linear
expressions of these amounts. `measure` evaluates the formulas with numbers. `solver.py` evaluates them with `Linear`
expressions. There, each call of `largest` adds a column to the program, and a row for each argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from memplug.tokenwise.plan.model import Bound, Budget, Group, InFlight, PlannedRegion, RegionPlan, TokenwisePlan


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear expression: a constant, and coefficients by column of a linear program."""

    constant: float = 0.0
    terms: Mapping[int, float] = field(default_factory=dict)

    def __add__(self, other: Linear | float) -> Linear:
        """Return the sum."""
        if not isinstance(other, Linear):
            return Linear(self.constant + other, self.terms)
        terms = dict(self.terms)
        for column, value in other.terms.items():
            terms[column] = terms.get(column, 0.0) + value
        return Linear(self.constant + other.constant, terms)

    def __sub__(self, other: Linear | float) -> Linear:
        """Return the difference."""
        return self + other * -1.0

    def __mul__(self, by: float) -> Linear:
        """Return the product with a number."""
        return Linear(self.constant * by, {column: value * by for column, value in self.terms.items()})

    def __truediv__(self, by: float) -> Linear:
        """Return the quotient by a number."""
        return self * (1.0 / by)

    __radd__, __rmul__ = __add__, __mul__


Quantity = float | Linear


class Amounts(NamedTuple):
    """Compute times and bytes of instances (single forwards) of regions, as numbers or as `Linear` expressions."""

    forward_s: Quantity = 0.0
    """Compute time of forward, without waits for the link."""
    backward_s: Quantity = 0.0
    """Compute time of backward and its recompute passes, without waits for the link."""
    link_bytes: Quantity = 0
    """Bytes copied to the host in forward, and back in backward."""
    host_bytes: Quantity = 0
    """Host memory, padding included."""
    kept_bytes: Quantity = 0
    """Bytes kept on the device from forward to backward."""

    def plus(self, other: Amounts, times: int = 1) -> Amounts:
        """Return these amounts plus `times` times `other`."""
        return Amounts(*(mine + times * its for mine, its in zip(self, other, strict=True)))


def together(one: Amounts, instances: int, staying: int) -> Amounts:
    """Return the amounts of several equal instances.

    Args:
        one: amounts of one instance.
        instances: number of instances that offload.
        staying: number of further instances, whose tensors stay on the device. They use neither the link nor host
            memory.
    """
    stays = one._replace(link_bytes=0, host_bytes=0)
    return Amounts().plus(one, instances).plus(stays, staying)


def unchosen(region: PlannedRegion, budget: Budget, inputs_swapped: bool, plain: bool = False) -> Amounts:
    """Return the amounts of one instance that no decision changes: its compute, and its input if inputs are swapped.

    A plain instance swaps no input, and memplug adds no overhead to its compute.
    """
    if plain:
        return Amounts(region.forward_s, region.backward_s)
    input_bytes, tensors = (region.input_bytes, region.input_tensors) if inputs_swapped else (0, 0)
    return Amounts(
        forward_s=region.forward_s + region.overhead_forward_s,
        backward_s=region.backward_s + region.overhead_backward_s,
        link_bytes=input_bytes,
        host_bytes=input_bytes + tensors * budget.padding_bytes,
    )


def chosen(
    budget: Budget, *, recompute_s: Quantity, swapped_bytes: Quantity, swapped_tensors: Quantity, kept_bytes: Quantity
) -> Amounts:
    """Return the amounts that one instance's decisions add to those of `unchosen`."""
    return Amounts(
        backward_s=recompute_s,
        link_bytes=swapped_bytes,
        host_bytes=swapped_bytes + swapped_tensors * budget.padding_bytes,
        kept_bytes=kept_bytes,
    )


def passes_s(
    first: Amounts, last: Amounts, budget: Budget, largest: Callable[..., Quantity] = max
) -> tuple[Quantity, Quantity]:
    """Return the seconds of forward and of backward: for each, the larger of its compute time and its copy time.

    MEMO requires that each layer's copies fit into that layer's forward. Here all copies of a pass together are
    compared with all compute of that pass. A copy may lag behind by more than a layer, buffers in flight smooth the
    differences between regions, and backward takes longer than forward. For equal layers this is MEMO's constraint.

    A region's first group may have other decisions than its last one. In forward, copies of the first groups may still
    run during the last groups. In backward, copies of the first groups may run ahead, during the last groups. The
    tensors of these copies take device memory: at most the bytes that the first groups' kept outputs leave free. Copies
    of the last groups never overlap with compute of the first groups.

    Args:
        first: amounts of the first groups of all regions.
        last: amounts of all other groups.
        budget: link rates and device bytes.
        largest: `max` for numbers. For expressions, `LinearProgram.largest`: it is exact because the program minimizes
            the times, and with them the columns that it returns.
    """
    unhidden_bytes = first.link_bytes + first.kept_bytes - budget.device_bytes
    all_bytes = first.link_bytes + last.link_bytes

    def pass_s(first_s: Quantity, last_s: Quantity, rate: float) -> Quantity:
        early_s = largest(first_s, unhidden_bytes / rate)
        return largest(early_s + last_s, early_s + last.link_bytes / rate, all_bytes / rate)

    return (
        pass_s(first.forward_s, last.forward_s, budget.d2h_bytes_per_s),
        pass_s(first.backward_s, last.backward_s, budget.h2d_bytes_per_s),
    )


def amounts(
    regions: Sequence[PlannedRegion], groups: Sequence[Sequence[Group]], budget: Budget, inputs_swapped: bool
) -> tuple[Amounts, Amounts]:
    """Return two sums over all regions: the amounts of each region's first group, and those of all other groups."""
    first, last = Amounts(), Amounts()
    for region, parts in zip(regions, groups, strict=True):
        for at, group in enumerate(parts):
            one = chosen(
                budget,
                recompute_s=group.recompute_s,
                swapped_bytes=group.swapped_bytes,
                swapped_tensors=swapped_tensors(region, group.fractions),
                kept_bytes=group.kept_bytes,
            ).plus(unchosen(region, budget, inputs_swapped, group.plain))
            every = together(one, group.instances, region.staying if group is parts[-1] else 0)
            first, last = (first.plus(every), last) if at == 0 else (first, last.plus(every))
    return first, last


def measure(
    regions: Sequence[PlannedRegion],
    groups: Sequence[Sequence[Group]],
    budget: Budget,
    *,
    inputs_swapped: bool,
    alpha: float | None = None,
    alpha_cut_by_host: bool = False,
) -> TokenwisePlan:
    """Return the plan that consists of these groups, with its predicted times and bytes.

    Args:
        regions: every kind of region of the step, once each.
        groups: each region's groups, in the order of the forward.
        budget: link rates, host bytes and device bytes; a plan that exceeds these bytes is returned too.
        inputs_swapped: see `TokenwisePlan`.
        alpha: see `TokenwisePlan`.
        alpha_cut_by_host: see `TokenwisePlan`.
    """
    first, last = amounts(regions, groups, budget, inputs_swapped)
    total, in_flight = first.plus(last), in_flight_bytes(regions, groups, budget)
    forward_s, backward_s = passes_s(first, last, budget)
    stalls_s = forward_s - total.forward_s, backward_s - total.backward_s
    plans = {}
    for region, parts in zip(regions, groups, strict=True):
        of_first, of_last = amounts([region], [parts], budget, inputs_swapped)
        own = of_first.plus(of_last)
        share = own.link_bytes / max(total.link_bytes, 1)
        plans[region.key] = RegionPlan(
            groups=tuple(parts),
            forward_s=own.forward_s + share * stalls_s[0],
            backward_s=own.backward_s + share * stalls_s[1],
        )
    uses: dict[Bound, tuple[float, float]] = {
        "host": (total.host_bytes, budget.host_bytes),
        "link forward": (total.link_bytes / budget.d2h_bytes_per_s, total.forward_s),
        "link backward": (total.link_bytes / budget.h2d_bytes_per_s, total.backward_s),
    }
    fullest = max(uses, key=lambda name: uses[name][0] / uses[name][1] if uses[name][1] > 0 else 1.0)
    to_gain = sum(stalls_s) > 0.0 or _can_spare(regions, groups)
    return TokenwisePlan(
        regions=plans,
        alpha=alpha,
        alpha_cut_by_host=alpha_cut_by_host,
        inputs_swapped=inputs_swapped,
        forward_s=forward_s,
        backward_s=backward_s,
        step_s=forward_s + backward_s,
        host_bytes=total.host_bytes,
        device_bytes=total.kept_bytes + in_flight,
        in_flight_bytes=in_flight,
        bound=fullest if to_gain else "none",
    )


def in_flight_bytes(regions: Sequence[PlannedRegion], groups: Sequence[Sequence[Group]], budget: Budget) -> int:
    """Return the bytes by which outputs in flight raise the step's peak above that of the safest setting.

    Rounding buffers are not included.
    """
    most_bytes = most_in_flight_bytes(regions, groups)
    return max(at.count * most_bytes - at.room_bytes for at in (*budget.in_flight, InFlight(0)))


def most_in_flight_bytes(regions: Sequence[PlannedRegion], groups: Sequence[Sequence[Group]]) -> int:
    """Return the largest `PlannedRegion.in_flight_bytes` of any instance."""
    each = (
        region.in_flight_bytes(group.fractions)
        for region, parts in zip(regions, groups, strict=True)
        for group in parts
        if group.instances
    )
    return max(each, default=0)


def swapped_tensors(region: PlannedRegion, swapped: Iterable[int]) -> int:
    """Return the number of tensors that one instance swaps, from the indices of its swapped operators."""
    return sum(len(region.operators[index].outputs) for index in swapped)


def _can_spare(regions: Sequence[PlannedRegion], groups: Sequence[Sequence[Group]]) -> bool:
    """Return whether a recompute pass spends time on an operator whose outputs could be captured instead."""
    return any(
        region.operators[index].time_s > 0.0 and region.operators[index].capturable
        for region, parts in zip(regions, groups, strict=True)
        for group in parts
        for index in group.runs
    )
