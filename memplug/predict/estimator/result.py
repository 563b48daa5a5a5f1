"""What a mode's step takes, and those of all modes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from memplug.errors import BudgetError
from memplug.predict.virtual import Hardware


@dataclass(frozen=True, slots=True)
class Span:
    """What kept a stream busy, in seconds from the beginning of its step; `queued_s`: when the host queued it."""

    stream: int
    begin_s: float
    end_s: float
    queued_s: float
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ModeEstimate:
    """One mode's step: forward, backward, and the optimizer if there is one.

    Attributes:
        mode: its name.
        step_s: seconds.
        flops: floating-point operations of matrix products and attention, recomputed ones included.
        peak_allocated_bytes: the most device memory that tensors have at a time.
        peak_reserved_bytes: that torch's caching allocator has of the device for that.
        arena_reserved_bytes: the same where the planned arena serves; None: there is none.
        arena_off_because: why there is none; "" where there is one.
        host_bytes: pinned memory of the host.
        to_host_bytes, to_device_bytes: over the link in a step.
        bound: what the step waits for: "compute", "link", "collectives" or "host".
        fits: the device has as much memory.
        spans: of all streams, in the order in which they were queued.
        schedule_s: of the step, forward and backward of all micro-batches; None: what trains does not tell.
        bubble_s: of the step, what a pipeline's stage waits for others.
    """

    mode: str
    step_s: float
    flops: float
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    arena_reserved_bytes: int | None
    host_bytes: int
    to_host_bytes: int
    to_device_bytes: int
    bound: str
    fits: bool
    spans: tuple[Span, ...] = field(default=(), repr=False)
    schedule_s: float | None = None
    bubble_s: float = 0.0
    arena_off_because: str = ""


@dataclass(frozen=True)
class Estimate(Mapping[str, ModeEstimate]):
    """By mode.

    Attributes:
        hardware: the GPU's profile.
        modes: those that could be estimated.
        impossible: why others have no plan.
        stages: of a pipeline, by number, what each that ran takes by itself (stages.py).
    """

    hardware: Hardware
    modes: Mapping[str, ModeEstimate]
    impossible: Mapping[str, BudgetError]
    stages: Mapping[int, Estimate] = field(default_factory=dict)

    def __getitem__(self, mode: str) -> ModeEstimate:
        return self.modes[mode]

    def __iter__(self) -> Iterator[str]:
        return iter(self.modes)

    def __len__(self) -> int:
        return len(self.modes)

    def over_keep(self, mode: str) -> float | None:
        """Its step's time over that of keeping everything; None where that was not asked for."""
        return self[mode].step_s / self["keep"].step_s if "keep" in self else None

    def utilization(self, mode: str, peak_flops: float) -> float | None:
        """Model FLOP/s utilization: what the model computes in a second, recomputation left out, over what the device
        could; None where keeping everything was not asked for.
        """
        return self["keep"].flops / self[mode].step_s / peak_flops if "keep" in self else None
