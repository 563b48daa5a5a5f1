"""What the token-wise planner reasons about: regions, plans, and which operators a recompute pass runs.

A *region* is a piece of the model that runs forward once and is recomputed before its backward (MEMO, section 4.1: a
transformer layer). Each of its operators' outputs is swapped to the host, kept on the device or recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from memplug.tokenwise.plan.rules import Passes, rows_taken


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """One operator of a region's forward; inputs and outputs are ids of storages, not of tensors.

    A view moves no bytes: list it without inputs and outputs and let its readers name the storage itself, otherwise
    an `always_runs` view keeps alive what no operator reads. An operator that mutates a storage names it among both.
    """

    name: str
    time_s: float
    """Time of one run over all rows."""
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    output_bytes: int
    """Bytes of all outputs: what swapping or keeping them costs."""
    capture: Literal["rows", "whole", "never"]
    """rows: any fraction of the rows may be swapped, the rest is recomputed alone; whole: all or nothing; never: a
    view, a random or a mutating operator."""
    rows: int = 0
    """Of an output that is swapped by rows: whole ones travel; 0: any fraction does."""
    always_runs: bool = False
    """Runs in every recompute pass whatever the plan (random operators, collectives): never captured."""
    always_swapped: bool = False
    """With a fixed alpha: swapped whole (MEMO: the attention output). The automatic plan decides by itself."""
    made_by_rows: int | None = None
    """Index of an operator before it that takes all the time, and that makes as many rows of several outputs as the one
    of them lacks of which the fewest are swapped; it is never captured itself."""

    @property
    def capturable(self) -> bool:
        """Whether its outputs may be swapped or kept, and need not run again then."""
        return self.capture != "never" and not self.always_runs


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """One kind of region; identical layers are one region with several instances."""

    key: str
    instances: int
    """Forwards alive at once at the peak of a step: layers times graphs in flight."""
    operators: tuple[Operator, ...]
    """In program order."""
    saved: frozenset[int]
    """Storages that backward asks for."""
    given: frozenset[int]
    """Storages there at the start of a recompute at no cost: region inputs, parameters, constants."""
    input_bytes: int
    """Input of one instance, swapped whole where the host has room."""
    input_tensors: int = 1
    forward_s: float
    """One instance, nothing swapped."""
    backward_s: float
    """One instance, nothing recomputed."""
    overhead_forward_s: float = 0.0
    """memplug's own work in one forward, as far as the device waits for it; a plain region has none."""
    overhead_backward_s: float = 0.0
    """Likewise in backward."""
    staying: int = 0
    """Forwards besides, planned as the last instances are: nothing of them leaves the device, as their backward comes
    before it would."""
    saved_bytes: int = 0
    """All that backward asks for, of one instance: its input too where that is saved and was swapped, but nothing else
    that was there before the region; 0: unknown."""

    @property
    def safest_bytes(self) -> int:
        """That the safest setting swaps of one instance besides its input: outputs of attention."""
        return sum(each.output_bytes for each in self.operators if each.capturable and each.always_swapped)

    def buffer_bytes(self, padding_bytes: int) -> int:
        """Of a rounding buffer that holds what the safest setting swaps of one instance, and padding for all it may."""
        tensors = self.input_tensors + sum(len(each.outputs) for each in self.operators if each.capturable)
        return self.input_bytes + self.safest_bytes + tensors * padding_bytes

    def in_flight_bytes(self, swapped: Iterable[int]) -> int:
        """Of one instance on its way to the host or back, where these operators' outputs are swapped: what it takes on
        top of the safest setting. A tensor that is swapped in part is there whole.
        """
        return max(0, sum(self.operators[index].output_bytes for index in swapped) - self.safest_bytes)


class InFlight(NamedTuple):
    """A time within a step, and what of swapped tensors is on the device then."""

    count: int
    """How many instances', on their way to the host or back, or not sent at all."""
    room_bytes: int = 0
    """By how much the observed step took less of the device then than at its peak."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """What the machine has to give."""

    d2h_bytes_per_s: float
    """Device to host, measured with both directions busy."""
    h2d_bytes_per_s: float
    """Host to device, measured with both directions busy."""
    host_bytes: int
    """Pinned host memory for swapped rows and inputs."""
    padding_bytes: int = 0
    """What each tensor there may take on top of its bytes, since it begins at a multiple of some number."""
    device_bytes: int
    """Device memory that may be spent on keeping, and on copies that lag behind or are in flight."""
    in_flight: tuple[InFlight, ...] = ()
    """Times at which the step may have its peak under a plan; none: what is in flight does not count."""
    buffers: int = 0
    """Rounding buffers for which a plan leaves room besides, each for what one instance swaps."""

    def with_buffers(self, regions: Sequence[Region]) -> Budget:
        """What is left where buffers are reserved for the safest setting: a plan that swaps more needs larger ones.
        Without room even for those there are none.
        """
        safest_bytes = max((region.buffer_bytes(self.padding_bytes) for region in regions), default=0)
        left_bytes = self.device_bytes - self.buffers * safest_bytes
        return replace(self, device_bytes=left_bytes) if left_bytes >= 0 else replace(self, buffers=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Consecutive instances of a region that are treated alike; all amounts are those of one instance."""

    instances: int
    fractions: dict[int, float]
    """Operator index -> fraction of its rows that is swapped, in (0, 1]."""
    keep: frozenset[int]
    """Operators whose outputs stay on the device."""
    runs: frozenset[int]
    """Operators that the recompute pass runs, those in `fractions` on their remaining rows."""
    swapped_bytes: int
    """Without the region's input."""
    kept_bytes: int
    recompute_s: float
    plain: bool = False
    """They run as they would without memplug: autograd keeps all that backward asks for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionPlan:
    """What happens to the outputs of one kind of region."""

    groups: tuple[Group, ...]
    """In the order of the forward, as the last instances live shortest: one or two, and one that is plain."""
    forward_s: float
    """All instances, with this region's share of the link's stall, by bytes."""
    backward_s: float
    """All instances, with recompute and this region's share of the link's stall."""

    def group(self, instance: int) -> Group:
        """The group of an instance, counted from 0 in the order of the forward; the last group past the end."""
        for group in self.groups:
            if instance < group.instances:
                return group
            instance -= group.instances
        return self.groups[-1]

    @property
    def swapped_bytes(self) -> int:
        """All instances, without inputs."""
        return sum(g.instances * g.swapped_bytes for g in self.groups)

    @property
    def kept_bytes(self) -> int:
        """All instances."""
        return sum(g.instances * g.kept_bytes for g in self.groups)

    @property
    def recompute_s(self) -> float:
        """All instances."""
        return sum(g.instances * g.recompute_s for g in self.groups)


Bound = Literal["link forward", "link backward", "host", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenwisePlan:
    """Keep, swap or recompute for every operator output of every region, and what it should cost."""

    regions: dict[str, RegionPlan]
    alpha: float | None
    """The one fraction in use (MEMO, section 4.1), None where the program chose one per operator."""
    alpha_cut_by_host: bool
    """The alpha asked for does not fit into host memory."""
    inputs_swapped: bool
    """False: host memory does not even hold the regions' inputs, which stay on the device."""
    forward_s: float
    backward_s: float
    """With recompute, as `step_s`: all instances of all regions."""
    step_s: float
    host_bytes: int
    """Swapped rows and inputs."""
    device_bytes: int
    """Kept outputs, and what is in flight."""
    in_flight_bytes: int
    """Of swapped outputs on their way, by which the step's peak is higher than at the safest setting."""
    bound: Bound
    """The fullest budget where swapping more could still spare recompute, or the link stalls; none: neither is so."""

    @property
    def kept_bytes(self) -> int:
        """Kept outputs, of all regions."""
        return self.device_bytes - self.in_flight_bytes


def needed(
    operators: Sequence[Operator], saved: Iterable[int], given: Collection[int], available: Collection[int]
) -> frozenset[int]:
    """Indices of the operators that a recompute pass must run.

    An operator runs if backward or a running operator wants one of its outputs, unless it is among `available`: the
    operators whose outputs are wholly there. More available, fewer run.

    Args:
        operators: the region's operators in program order.
        saved: storages that backward asks for.
        given: storages there without cost.
        available: indices of the operators whose outputs are kept or swapped whole.
    """
    return passes_of(operators, given).asked(saved, available)[0]


def passes_of(operators: Sequence[Operator], given: Collection[int]) -> Passes:
    """Returns the recompute passes of a region."""
    inputs, outputs = [each.inputs for each in operators], [each.outputs for each in operators]
    return Passes(inputs, outputs, [each.always_runs for each in operators], given)


def group_of(region: Region, instances: int, fractions: dict[int, float], keep: Collection[int]) -> Group:
    """A group whose `runs` cover all that the choice leaves open, so that any choice is a valid one.

    Choices for outputs that are not wanted are dropped.
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


def recompute_s(operators: Sequence[Operator], runs: Collection[int], fractions: dict[int, float]) -> float:
    """Seconds of a recompute pass that runs those operators, on the rows that are not swapped."""
    rest: dict[int, float] = {}  # of an operator that makes others by rows: the most that one of them lacks
    for index in runs:
        maker = operators[index].made_by_rows
        if maker is not None:
            rest[maker] = max(rest.get(maker, 0.0), 1.0 - fractions.get(index, 0.0))
    return sum(rest.get(index, 1.0 - fractions.get(index, 0.0)) * operators[index].time_s for index in sorted(runs))


def _in_rows(fraction: float, rows: int) -> float:
    """The fraction that whole rows make of it, never more."""
    return math.floor(fraction * rows + 1e-6) / rows if rows else fraction


def part_bytes(nbytes: int, rows: int, fraction: float) -> int:
    """Of an output of `nbytes` and so many rows (0: unknown), what a fraction of it takes, in whole rows."""
    return rows_taken(fraction, rows) * nbytes // rows if rows else int(fraction * nbytes)
