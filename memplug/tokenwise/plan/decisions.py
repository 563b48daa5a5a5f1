"""Decisions: what a plan says of each region of a program, operator by operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from memplug.plans.schema import PlanPart
from memplug.tokenwise.plan.model import TokenwisePlan


class Decision(NamedTuple):
    """Of one operator's outputs: swap their first rows, or keep them. An operator without a decision is recomputed."""

    operator: str
    """Its name with the overload, such as "aten::mm"; a forward that runs another one there captures by kind."""
    fraction: float
    """Of the rows, in (0, 1]; 1 where the outputs are kept."""
    keep: bool = False


@dataclass(frozen=True)
class Learnt:
    """What the forwards of a region have shown under a setting.

    Attributes:
        communicates: recompute passes launch collectives, which all ranks must do alike.
        offloads_late: its backward runs before its tensors have to be released, so they leave only if they have to.
        unneeded: operators whose captured outputs no backward asked for, by index; as `Decision.operator`.
        asks: its forward asks for a gradient itself, for which it needs what autograd has saved so far.
    """

    communicates: bool
    offloads_late: bool
    unneeded: dict[int, str]
    asks: bool


@dataclass(frozen=True)
class Setting:
    """What a plan sets on one region. By itself the safest: input and attention outputs swapped, every matmul
    recomputed.

    Attributes:
        key: regions of one key ran the same operators and share a plan.
        rows: fraction of the rows of every matmul's output to swap, [0, 1], where no plan says so.
        plan: decisions by index of the operator in the region's tape; None before there is a plan.
        swaps_input: the input leaves for the host; else it is held.
        forward_bytes: that one forward offloads, as predicted; None where nothing was.
        planned_from: fingerprint of the tape that the plan was made from; None: of none, or of an opaque region.
        plain_bytes: it runs as it would without memplug where it is given no more than so many bytes of tensors; None:
            it never does.
        kept_bytes: of outputs that stay on the device from one forward to its backward, as planned.
        recomputed_bytes: of outputs that one recompute pass makes, as planned.
        is_agreed: the ranks that its units communicate with run it by the same setting: a unit of it that communicates
            may run again. Else all of what such units made is swapped.
        learnt: what forwards under it have shown in an earlier run; None: nothing yet.
    """

    key: str
    rows: float = 0.0
    plan: dict[int, Decision] | None = None
    swaps_input: bool = True
    forward_bytes: int | None = None
    planned_from: int | None = None
    plain_bytes: int | None = None
    kept_bytes: int = 0
    recomputed_bytes: int = 0
    is_agreed: bool = False
    learnt: Learnt | None = None


@dataclass(frozen=True, kw_only=True)
class Decisions(PlanPart):
    """How to run one program: a plan, and what it sets on each region, by name."""

    name = "tokenwise"
    solution: TokenwisePlan
    settings: dict[str, Setting]
    frame_bytes: int = 0
    """Of the region that swaps the most: what its tensors take on the device once prefetched, at most."""
    peak_bytes: int | None = None
    """Predicted largest allocation total of the device, without rounding buffers."""
    held_bytes: int | None = None
    """What regions' saved tensors may take of the device at a time, for that prediction to hold; None: as much as with
    full recomputation."""
    full_recomputation_s: float | None = None
    """Predicted time of all regions in a step that recomputes everything."""
    d2h_bytes_per_s: float = 0.0
    """Rate of the link to the host when the plan was kept; 0: unknown."""
    h2d_bytes_per_s: float = 0.0
    """Rate of the link to the device, likewise."""

    def does_as(self, other: Decisions) -> bool:
        """Returns whether regions run the same."""
        return self.settings == other.settings
