"""Tokenwise's part of a plan, as stored on disk: each region's decisions, by operator."""

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
    """The operator's name with its overload, such as "aten::mm". If a forward runs another operator at this index, the
    decision does not count: a matmul is swapped by the fraction `Setting.rows`, another expensive operator whole."""
    fraction: float
    """Fraction of the rows to swap, in (0, 1]; 1 if the outputs are kept."""
    keep: bool = False


@dataclass(frozen=True)
class Learnt:
    """Findings about a region from its forwards under one setting.

    Attributes:
        communicates: whether the region's recompute passes launch collectives, so all ranks must run the same passes.
        offloads_late: whether, in the last step, the region's backward ran before any of its tensors had to be
            released. If so, the region offloads a tensor only when the tensor has to be released.
        unneeded: operators whose captured outputs no backward asked for. Maps an operator's index to its name
            (`Decision.operator`).
        asks: whether the region's forward itself computes a gradient: that needs every tensor that autograd has saved
            so far.
    """

    communicates: bool
    offloads_late: bool
    unneeded: dict[int, str]
    asks: bool


@dataclass(frozen=True)
class Setting:
    """The decisions of one region.

    The default values are the safest setting: inputs and attention outputs swapped, every matmul recomputed.

    Attributes:
        key: regions with the same key ran the same operators and share a plan.
        rows: fraction of the rows of a matmul's output to swap, in [0, 1]. It counts only if `plan` is None or names
            another operator at the matmul's index.
        plan: decisions by index of the operator in the region's tape; None before there is a plan.
        swaps_input: whether the input is offloaded; if not, it stays on the device.
        forward_bytes: predicted bytes that one forward offloads; None without a prediction.
        planned_from: fingerprint of the tape that the plan was made from; None if there is no such tape, as for an
            opaque region.
        plain_bytes: the region runs as without memplug if the tensors among its arguments take at most this many bytes
            together; None: it never does.
        kept_bytes: planned bytes of outputs that stay on the device from one forward to its backward.
        recomputed_bytes: planned bytes of outputs that one recompute pass makes.
        is_agreed: whether all ranks with which the region's units communicate use this setting too. If so, a recompute
            pass may run these units a second time. If not, all of their outputs are swapped.
        learnt: findings of an earlier run under this setting; None if there are none.
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
    """The decisions for one program: the solver's plan, and each region's setting by the region's name."""

    name = "tokenwise"
    solution: TokenwisePlan
    settings: dict[str, Setting]
    frame_bytes: int = 0
    """Device bytes that the swapped tensors of the largest region take once they are prefetched."""
    peak_bytes: int | None = None
    """Predicted peak of the memory allocated on the device, without rounding buffers; None: unknown."""
    held_bytes: int | None = None
    """Limit, in backward, of the device bytes of all regions' saved tensors together; `peak_bytes` assumes this limit.
    None: the executor's default limit, that of full recomputation."""
    full_recomputation_s: float | None = None
    """Predicted time of all regions in a step that recomputes everything."""
    d2h_bytes_per_s: float = 0.0
    """Link rate from device to host when the plan was stored; 0: unknown."""
    h2d_bytes_per_s: float = 0.0
    """Link rate from host to device at that time; 0: unknown."""

    def does_as(self, other: Decisions) -> bool:
        """Return whether every region has the same setting under `other`."""
        return self.settings == other.settings
