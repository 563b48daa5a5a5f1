"""The tokenwise part of a plan, as it is kept on disk: decisions for each region of a program, by operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from memplug.plans.schema import PlanPart
from memplug.tokenwise.plan.model import TokenwisePlan


class Decision(NamedTuple):
    """The decision for one operator's outputs: swap their first rows, or keep them.

    An operator without a decision is recomputed.
    """

    operator: str
    """The operator's name with its overload, such as "aten::mm". If a forward runs another operator at this index,
    that operator's kind decides how much is swapped."""
    fraction: float
    """Fraction of the rows to swap, in (0, 1]; 1 where the outputs are kept."""
    keep: bool = False


@dataclass(frozen=True)
class Learnt:
    """Findings about a region from its forwards under one setting.

    Attributes:
        communicates: its recompute passes launch collectives, which all ranks must launch alike.
        offloads_late: in its last step, backward ran before any of its tensors had to be released. So it now offloads
            a tensor only when the tensor has to be released.
        unneeded: operators whose captured outputs no backward asked for: index to name, as in `Decision.operator`.
        asks: its forward computes a gradient itself, which needs all that autograd has saved until then.
    """

    communicates: bool
    offloads_late: bool
    unneeded: dict[int, str]
    asks: bool


@dataclass(frozen=True)
class Setting:
    """The decisions of one region.

    A setting with default values is the safest: inputs and attention outputs swapped, every matmul recomputed.

    Attributes:
        key: regions with the same key ran the same operators and share a plan.
        rows: fraction of the rows of every matmul's output to swap, in [0, 1], where `plan` does not decide.
        plan: decisions by index of the operator in the region's tape; None before there is a plan.
        swaps_input: the input is offloaded; else it is held on the device.
        forward_bytes: predicted bytes that one forward offloads; None without a prediction.
        planned_from: fingerprint of the tape that the plan was made from; None without such a tape, as for an opaque
            region.
        plain_bytes: the region runs as without memplug if the tensors among its arguments have no more bytes than this;
            None: it never does.
        kept_bytes: planned bytes of outputs that stay on the device from one forward to its backward.
        recomputed_bytes: planned bytes of outputs that one recompute pass makes.
        is_agreed: True if all ranks that the region's units communicate with run the region by the same setting. Then a
            recompute pass may run a unit that communicates again. If not, all outputs of these units are swapped.
        learnt: findings of an earlier run under this setting; None: nothing yet.
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
    """The decisions for one program: a plan, and the setting that it gives each region, by name."""

    name = "tokenwise"
    solution: TokenwisePlan
    settings: dict[str, Setting]
    frame_bytes: int = 0
    """Largest number of device bytes that one region's tensors take once prefetched."""
    peak_bytes: int | None = None
    """Predicted peak of the memory allocated on the device, without rounding buffers; None: unknown."""
    held_bytes: int | None = None
    """Limit of the device bytes of all regions' saved tensors together; within it the predicted peak holds. None: the
    limit is that of full recomputation."""
    full_recomputation_s: float | None = None
    """Predicted time of all regions in a step that recomputes everything."""
    d2h_bytes_per_s: float = 0.0
    """Link rate from device to host when the plan was kept; 0: unknown."""
    h2d_bytes_per_s: float = 0.0
    """Link rate from host to device, likewise."""

    def does_as(self, other: Decisions) -> bool:
        """Return whether regions run the same under these decisions and `other`."""
        return self.settings == other.settings
