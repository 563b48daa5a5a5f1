"""The data of the token-wise planner: regions, budgets and plans, and which operators a recompute pass runs.

A *region* is a piece of the model that runs forward once and is recomputed before its backward (MEMO, section 4.1: a
transformer layer). Each output of its operators is swapped to the host, kept on the device or recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from memplug.tokenwise.plan.rules import Passes, rows_taken


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedOperator:
    """One operator of a region's forward; inputs and outputs are ids of storages, not of tensors.

    A view moves no bytes: list it without inputs and outputs, and let its readers name the storage. Otherwise a view
    with `always_runs` would keep a storage alive that no operator reads. An operator that mutates a storage lists it as
    input and output.
    """

    name: str
    time_s: float
    """Seconds of one run over all rows."""
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    output_bytes: int
    """Bytes of all outputs: the cost of swapping or keeping them."""
    capture: Literal["rows", "whole", "never"]
    """rows: any fraction of the rows may be swapped, and only the other rows are recomputed; whole: all or nothing;
    never: a view, a random or a mutating operator."""
    rows: int = 0
    """Number of rows of an output that is swapped by rows: only whole rows are copied. 0: any fraction is possible."""
    always_runs: bool = False
    """Every recompute pass runs it, whatever the plan (random operators, collectives): it is never captured."""
    always_swapped: bool = False
    """A fixed alpha swaps it whole (MEMO: the attention output). The automatic plan decides by itself."""
    made_by_rows: int | None = None
    """Index of the earlier operator (a unit) that makes this output; the unit's time includes making it. A unit may
    make several outputs: it runs for the rows that the output with the fewest swapped rows lacks. The unit itself is
    never captured."""

    @property
    def capturable(self) -> bool:
        """Return whether its outputs may be swapped or kept, so that it need not run again."""
        return self.capture != "never" and not self.always_runs


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRegion:
    """One kind of region; identical layers are one region with several instances."""

    key: str
    instances: int
    """Forwards alive at once at the peak of a step: layers times graphs in flight."""
    operators: tuple[PlannedOperator, ...]
    """The operators of its forward, in program order."""
    saved: frozenset[int]
    """Storages that backward asks for."""
    given: frozenset[int]
    """Storages that a recompute pass finds at no cost: region inputs, parameters, constants."""
    input_bytes: int
    """Input bytes of one instance, swapped whole where the host has room."""
    input_tensors: int = 1
    forward_s: float
    """Seconds of one instance, nothing swapped."""
    backward_s: float
    """Seconds of one instance, nothing recomputed."""
    overhead_forward_s: float = 0.0
    """Seconds of one forward in which the device waits for memplug's own work; a plain region has none."""
    overhead_backward_s: float = 0.0
    """The same for backward."""
    staying: int = 0
    """Further forwards whose tensors stay on the device, because backward starts before they would leave. They are
    planned like the last instances."""
    saved_bytes: int = 0
    """Bytes of all tensors that backward of one instance asks for. Of tensors that existed before the region, only a
    swapped input counts. 0: unknown."""

    @property
    def safest_bytes(self) -> int:
        """Return the bytes of one instance that the safest setting swaps besides its input: attention outputs."""
        return sum(each.output_bytes for each in self.operators if each.capturable and each.always_swapped)

    def buffer_bytes(self, padding_bytes: int) -> int:
        """Return the size of a rounding buffer for one instance at the safest setting.

        It includes padding for every tensor that a plan may swap.
        """
        tensors = self.input_tensors + sum(len(each.outputs) for each in self.operators if each.capturable)
        return self.input_bytes + self.safest_bytes + tensors * padding_bytes

    def in_flight_bytes(self, swapped: Iterable[int]) -> int:
        """Return by how many device bytes one instance's tensors in flight exceed those of the safest setting.

        A tensor that is swapped in part counts whole: in flight, all of it is on the device.

        Args:
            swapped: indices of the operators whose outputs are swapped.
        """
        return max(0, sum(self.operators[index].output_bytes for index in swapped) - self.safest_bytes)


class InFlight(NamedTuple):
    """A time within a step at which swapped tensors are in flight on the device."""

    count: int
    """Number of instances whose swapped tensors are being copied to the host or back, or were not offloaded at all."""
    room_bytes: int = 0
    """Bytes by which the device memory of the observed step lay below that step's peak at this time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """The link rates and the memory that a plan may use."""

    d2h_bytes_per_s: float
    """Device to host, measured with both directions busy."""
    h2d_bytes_per_s: float
    """Host to device, measured with both directions busy."""
    host_bytes: int
    """Pinned host memory for swapped rows and inputs."""
    padding_bytes: int = 0
    """Largest padding of one tensor in host memory, where each tensor begins at a multiple of a fixed size."""
    device_bytes: int
    """Device memory for outputs that are kept, in flight, or waiting for a copy that lags behind."""
    in_flight: tuple[InFlight, ...] = ()
    """Times at which a step under a plan may have its peak; empty: bytes in flight do not count."""
    buffers: int = 0
    """Number of rounding buffers that the plan has to leave device memory for, each as large as the swapped tensors of
    one instance."""

    def with_buffers(self, regions: Sequence[PlannedRegion]) -> Budget:
        """Return the budget less the rounding buffers of the safest setting, or without buffers if they do not fit.

        A plan that swaps more than the safest setting needs larger buffers; the difference is not subtracted.
        """
        safest_bytes = max((region.buffer_bytes(self.padding_bytes) for region in regions), default=0)
        left_bytes = self.device_bytes - self.buffers * safest_bytes
        return replace(self, device_bytes=left_bytes) if left_bytes >= 0 else replace(self, buffers=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Consecutive instances of a region with the same decisions; all amounts are those of one instance."""

    instances: int
    fractions: dict[int, float]
    """Fraction of its rows that is swapped, in (0, 1], by index of the operator."""
    keep: frozenset[int]
    """Operators whose outputs stay on the device."""
    runs: frozenset[int]
    """Operators that the recompute pass runs. An operator in `fractions` runs on its remaining rows only."""
    swapped_bytes: int
    """Bytes swapped, without the region's input."""
    kept_bytes: int
    recompute_s: float
    plain: bool = False
    """The instances run as without memplug: autograd keeps all that backward asks for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionPlan:
    """The decisions for one kind of region, and what they should cost."""

    groups: tuple[Group, ...]
    """One or two groups, and possibly a plain one, in the order of the forward: the tensors of the last instances
    live shortest."""
    forward_s: float
    """Seconds of all instances, with this region's share of the time that forward waits for the link. The share is in
    proportion to the bytes that the region swaps."""
    backward_s: float
    """The same for backward, with recompute."""

    def group(self, instance: int) -> Group:
        """Return the group of an instance, counted from 0 in the order of the forward; past the end, the last group."""
        for group in self.groups:
            if instance < group.instances:
                return group
            instance -= group.instances
        return self.groups[-1]

    @property
    def swapped_bytes(self) -> int:
        """Return the bytes that all instances swap, without inputs."""
        return sum(g.instances * g.swapped_bytes for g in self.groups)

    @property
    def kept_bytes(self) -> int:
        """Return the bytes that all instances keep on the device."""
        return sum(g.instances * g.kept_bytes for g in self.groups)

    @property
    def recompute_s(self) -> float:
        """Return the seconds of all instances' recompute passes."""
        return sum(g.instances * g.recompute_s for g in self.groups)


Bound = Literal["link forward", "link backward", "host", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenwisePlan:
    """The decision on every operator output of every region (keep, swap or recompute), and the predicted cost."""

    regions: dict[str, RegionPlan]
    alpha: float | None
    """The one fraction in use (MEMO, section 4.1); None where each operator has its own."""
    alpha_cut_by_host: bool
    """Whether alpha is smaller than asked for because host memory has no room for more."""
    inputs_swapped: bool
    """False: host memory has no room even for the regions' inputs, which stay on the device."""
    forward_s: float
    """Seconds of all instances of all regions, with waits for the link."""
    backward_s: float
    """The same for backward, with recompute."""
    step_s: float
    """Forward and backward together."""
    host_bytes: int
    """Host memory for swapped rows and inputs."""
    device_bytes: int
    """Bytes of kept outputs and bytes in flight."""
    in_flight_bytes: int
    """Bytes by which swapped outputs in flight raise the step's peak above that of the safest setting."""
    bound: Bound
    """The budget of which the largest share is used; "none" if nothing waits for the link and swapping more could spare
    no recompute."""

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of kept outputs, of all regions."""
        return self.device_bytes - self.in_flight_bytes


def needed(
    operators: Sequence[PlannedOperator], saved: Iterable[int], given: Collection[int], available: Collection[int]
) -> frozenset[int]:
    """Return the indices of the operators that a recompute pass must run.

    An operator runs if backward or a running operator asks for one of its outputs, unless the operator is `available`.
    The more operators are available, the fewer run.

    Args:
        operators: the region's operators in program order.
        saved: storages that backward asks for.
        given: storages that exist at no cost.
        available: indices of the operators whose outputs are kept or swapped whole.
    """
    return passes_of(operators, given).asked(saved, available)[0]


def passes_of(operators: Sequence[PlannedOperator], given: Collection[int]) -> Passes:
    """Return the recompute passes of a region with these operators."""
    inputs, outputs = [each.inputs for each in operators], [each.outputs for each in operators]
    return Passes(inputs, outputs, [each.always_runs for each in operators], given)


def group_of(region: PlannedRegion, instances: int, fractions: dict[int, float], keep: Collection[int]) -> Group:
    """Return the group with a choice of fractions and kept outputs.

    Its recompute pass runs every operator that backward then still needs, so any choice is valid. Choices for outputs
    that neither backward nor the pass asks for are dropped.
    """
    operators = region.operators
    available = {index for index, fraction in fractions.items() if fraction >= 1.0} | set(keep)
    runs, asked = passes_of(operators, region.given).asked(region.saved, available)
    keep = frozenset(keep) & asked
    fractions = {index: _in_rows(fraction, operators[index].rows) for index, fraction in fractions.items()}
    fractions = {i: fractions[i] for i in sorted(fractions) if i in asked and i not in keep and fractions[i] > 0.0}
    return Group(
        instances=instances,
        fractions=fractions,
        keep=keep,
        runs=runs,
        swapped_bytes=sum(
            part_bytes(operators[index].output_bytes, operators[index].rows, fraction)
            for index, fraction in fractions.items()
        ),
        kept_bytes=sum(operators[index].output_bytes for index in keep),
        recompute_s=recompute_s(operators, runs, fractions),
    )


def recompute_s(operators: Sequence[PlannedOperator], runs: Collection[int], fractions: dict[int, float]) -> float:
    """Return the seconds of a recompute pass that runs these operators, on the rows that are not swapped."""
    rest: dict[int, float] = {}  # maker of outputs by rows -> the largest fraction of rows that one output lacks
    for index in runs:
        maker = operators[index].made_by_rows
        if maker is not None:
            rest[maker] = max(rest.get(maker, 0.0), 1.0 - fractions.get(index, 0.0))
    return sum(rest.get(index, 1.0 - fractions.get(index, 0.0)) * operators[index].time_s for index in sorted(runs))


def _in_rows(fraction: float, rows: int) -> float:
    """Round a fraction down to whole rows."""
    return math.floor(fraction * rows + 1e-6) / rows if rows else fraction


def part_bytes(nbytes: int, rows: int, fraction: float) -> int:
    """Return the bytes of a fraction of an output, in whole rows if their number is known.

    Args:
        nbytes: size of the output.
        rows: its number of rows; 0: unknown.
        fraction: the fraction of its rows, in [0, 1].
    """
    return rows_taken(fraction, rows) * nbytes // rows if rows else int(fraction * nbytes)
