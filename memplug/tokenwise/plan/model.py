"""The planner's data: regions, budgets and plans; and a function that finds the operators of a recompute pass.

A *region* is a piece of the model that runs forward once and is recomputed before its backward (MEMO, section 4.1: a
transformer layer). Each output of its operators is swapped to the host, kept on the device or recomputed. Regions that
run the same operators are *instances* of one `PlannedRegion`; so are several forwards in flight of one region.
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

    A view moves no bytes, so it has no inputs and outputs here. Operators that read the view have the viewed storage as
    input. (Otherwise a view with `always_runs` would make recompute passes produce a storage that no operator reads.)
    An operator that mutates a storage lists it as input and as output.
    """

    name: str
    time_s: float
    """Seconds of one run over all rows."""
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    output_bytes: int
    """Bytes of all outputs together."""
    capture: Literal["rows", "whole", "never"]
    """How the outputs may be captured. "rows": any fraction of the rows is swapped, and the other rows are recomputed.
    "whole": all rows or none. "never": for views, random operators, mutating operators and small outputs."""
    rows: int = 0
    """Rows of an output that is captured by rows: only whole rows are copied. 0: unknown, any fraction is possible."""
    always_runs: bool = False
    """Whether every recompute pass runs the operator (random operators, collectives); it is never captured."""
    always_swapped: bool = False
    """Whether a plan with a fixed alpha swaps the outputs whole (MEMO: the attention output)."""
    made_by_rows: int | None = None
    """Index of the unit, an earlier operator, that makes this output; None: the operator makes it itself. The unit's
    time includes making the output. A recompute pass runs the unit on each row that is missing in any of its outputs.
    The unit itself is never captured."""

    @property
    def capturable(self) -> bool:
        """Return whether the outputs may be captured, so that the operator need not run again."""
        return self.capture != "never" and not self.always_runs


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRegion:
    """One kind of region; identical layers are one region with several instances."""

    key: str
    instances: int
    """Number of forwards alive at once at the peak of a step: layers times graphs in flight."""
    operators: tuple[PlannedOperator, ...]
    """The operators of the region's forward, in program order."""
    saved: frozenset[int]
    """Storages that backward asks for."""
    given: frozenset[int]
    """Storages that a recompute pass need not make: region inputs, parameters, constants."""
    input_bytes: int
    """Input bytes of one instance. Inputs are swapped whole if the host has room."""
    input_tensors: int = 1
    forward_s: float
    """Seconds of one instance's forward without swaps."""
    backward_s: float
    """Seconds of one instance's backward without a recompute pass."""
    overhead_forward_s: float = 0.0
    """Seconds of one forward in which the device waits for memplug's own work; a plain instance has none."""
    overhead_backward_s: float = 0.0
    """Seconds of one backward in which the device waits for memplug's own work."""
    staying: int = 0
    """Number of further instances whose tensors stay on the device, because their backward starts before the tensors
    have to be released. These instances get the decisions of the last group."""
    saved_bytes: int = 0
    """Bytes of all tensors that the backward of one instance asks for; 0: unknown. Of the tensors that existed before
    the region, only a swapped input counts."""

    @property
    def safest_bytes(self) -> int:
        """Return the bytes of one instance's attention outputs, which the safest setting swaps besides the input."""
        return sum(each.output_bytes for each in self.operators if each.capturable and each.always_swapped)

    def buffer_bytes(self, padding_bytes: int) -> int:
        """Return the size of a rounding buffer for one instance at the safest setting.

        It includes padding for every tensor that a plan may swap.
        """
        tensors = self.input_tensors + sum(len(each.outputs) for each in self.operators if each.capturable)
        return self.input_bytes + self.safest_bytes + tensors * padding_bytes

    def in_flight_bytes(self, swapped: Iterable[int]) -> int:
        """Return by how many device bytes one instance's tensors in flight exceed those of the safest setting.

        A partly swapped tensor counts whole, since all of it is on the device while its rows are in flight.

        Args:
            swapped: indices of the operators whose outputs are swapped.
        """
        return max(0, sum(self.operators[index].output_bytes for index in swapped) - self.safest_bytes)


class InFlight(NamedTuple):
    """A time within a step at which swapped tensors are in flight on the device."""

    count: int
    """Number of instances whose swapped tensors are on the device: being copied, or not offloaded at all."""
    room_bytes: int = 0
    """Bytes by which the observed step's memory at this time is below that step's peak."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """The link rates and the memory that a plan may use."""

    d2h_bytes_per_s: float
    """Link rate from device to host, measured with both directions busy."""
    h2d_bytes_per_s: float
    """Link rate from host to device, measured with both directions busy."""
    host_bytes: int
    """Pinned host memory for swapped rows and inputs."""
    padding_bytes: int = 0
    """Largest padding of one tensor in host memory, where each tensor begins at a multiple of a fixed size."""
    device_bytes: int
    """Device memory for outputs that are kept, being copied, or waiting for their copy."""
    in_flight: tuple[InFlight, ...] = ()
    """Times at which a step under a plan may reach its peak; empty: bytes in flight do not count."""
    buffers: int = 0
    """Number of rounding buffers for which the plan leaves device memory. Each is as large as one instance's swapped
    tensors."""

    def with_buffers(self, regions: Sequence[PlannedRegion]) -> Budget:
        """Return the budget less the bytes of its rounding buffers, sized for the safest setting.

        If the buffers do not fit, return a budget with `buffers` 0. A plan that swaps more than the safest setting
        needs larger buffers; the difference is not subtracted here.
        """
        safest_bytes = max((region.buffer_bytes(self.padding_bytes) for region in regions), default=0)
        left_bytes = self.device_bytes - self.buffers * safest_bytes
        return replace(self, device_bytes=left_bytes) if left_bytes >= 0 else replace(self, buffers=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Consecutive instances of a region with the same decisions; bytes and seconds are those of one instance."""

    instances: int
    fractions: dict[int, float]
    """Swapped fraction of an operator's rows, in (0, 1], by the operator's index."""
    keep: frozenset[int]
    """Indices of the operators whose outputs are kept on the device."""
    runs: frozenset[int]
    """Indices of the operators that the recompute pass runs. Operators in `fractions` run only on rows that are not
    swapped."""
    swapped_bytes: int
    """Bytes swapped, the region's input not included."""
    kept_bytes: int
    recompute_s: float
    plain: bool = False
    """The instances run as without memplug: autograd keeps all that backward asks for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionPlan:
    """The decisions for one kind of region, and their predicted time."""

    groups: tuple[Group, ...]
    """One or two groups in the order of the forward, then possibly a plain one. The plain instances are the last,
    because their tensors live shortest."""
    forward_s: float
    """Seconds of all instances' forwards, with this region's share of the waits for the link. The share is proportional
    to the bytes that the region swaps."""
    backward_s: float
    """Seconds of all instances' backwards and recompute passes, with this region's share of the waits for the link."""

    def group(self, instance: int) -> Group:
        """Return the group of an instance by its index in the order of the forward; past the end, the last group."""
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
    """The decisions for every region's operators (keep, swap or recompute), and the predicted cost."""

    regions: dict[str, RegionPlan]
    alpha: float | None
    """MEMO's one fraction for all tensors (section 4.1); None if each operator has its own."""
    alpha_cut_by_host: bool
    """Whether `alpha` was lowered to fit host memory."""
    inputs_swapped: bool
    """Whether the regions' inputs are swapped. If not, they stay on the device."""
    forward_s: float
    """Seconds of the forwards of all regions' instances, with waits for the link."""
    backward_s: float
    """Seconds of all instances' backwards and recompute passes, with waits for the link."""
    step_s: float
    """Forward and backward together."""
    host_bytes: int
    """Host memory for swapped rows and inputs."""
    device_bytes: int
    """Bytes of kept outputs and bytes in flight."""
    in_flight_bytes: int
    """Bytes by which swapped outputs in flight raise the step's peak above that of the safest setting."""
    bound: Bound
    """The limit that the plan comes closest to; "none" if nothing waits for the link and no capture could replace any
    remaining recomputation."""

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of all regions' kept outputs."""
        return self.device_bytes - self.in_flight_bytes


def needed(
    operators: Sequence[PlannedOperator], saved: Iterable[int], given: Collection[int], available: Collection[int]
) -> frozenset[int]:
    """Return the indices of the operators that a recompute pass must run.

    An operator runs if backward, or another operator that runs, asks for one of its outputs and the operator is not in
    `available`.

    Args:
        operators: the region's operators in program order.
        saved: storages that backward asks for.
        given: storages that no operator has to make.
        available: indices of the operators whose outputs are kept or swapped whole.
    """
    return passes_of(operators, given).asked(saved, available)[0]


def passes_of(operators: Sequence[PlannedOperator], given: Collection[int]) -> Passes:
    """Return the `Passes` of a region with these operators."""
    inputs, outputs = [each.inputs for each in operators], [each.outputs for each in operators]
    return Passes(inputs, outputs, [each.always_runs for each in operators], given)


def group_of(region: PlannedRegion, instances: int, fractions: dict[int, float], keep: Collection[int]) -> Group:
    """Return the group with these fractions and kept outputs.

    Any combination is valid, since the recompute pass runs every operator that backward still needs. Outputs that
    neither backward nor the pass asks for are not captured.
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
    """Return the seconds of a recompute pass that runs these operators on the rows that are not swapped."""
    rest: dict[int, float] = {}  # unit -> largest fraction of rows that one of its outputs lacks
    for index in runs:
        maker = operators[index].made_by_rows
        if maker is not None:
            rest[maker] = max(rest.get(maker, 0.0), 1.0 - fractions.get(index, 0.0))
    return sum(rest.get(index, 1.0 - fractions.get(index, 0.0)) * operators[index].time_s for index in sorted(runs))


def _in_rows(fraction: float, rows: int) -> float:
    """Round a fraction down to whole rows."""
    return math.floor(fraction * rows + 1e-6) / rows if rows else fraction


def part_bytes(nbytes: int, rows: int, fraction: float) -> int:
    """Return the bytes of a fraction of an output, in whole rows if the number of rows is known.

    Args:
        nbytes: size of the output.
        rows: its number of rows; 0: unknown.
        fraction: the fraction of its rows, in [0, 1].
    """
    return rows_taken(fraction, rows) * nbytes // rows if rows else int(fraction * nbytes)
