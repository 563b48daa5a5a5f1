"""The results of an estimate: one mode's step with its time and memory, and the collection of all modes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from memplug.errors import BudgetError
from memplug.predict.virtual import GpuProfile


@dataclass(frozen=True, slots=True)
class Span:
    """An interval in which one kernel or copy kept a stream busy.

    Attributes:
        stream: The stream's number; 0 is the default stream.
        begin_s: Seconds from the step's beginning until the kernel or copy begins.
        end_s: Seconds from the step's beginning until the kernel or copy ends.
        queued_s: Seconds from the step's beginning until the host queued the kernel or copy.
        name: The name of the operator or collective, or the direction of the copy.
    """

    stream: int
    begin_s: float
    end_s: float
    queued_s: float
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ModeEstimate:
    """One mode's step: forward, backward, and the optimizer if there is one.

    Attributes:
        mode: The mode's name.
        step_s: Duration of the step, in seconds.
        flops: Floating-point operations of matrix products and attention, including recomputed ones.
        peak_allocated_bytes: Peak device memory that torch's caching allocator hands out to tensors, without the arena.
        peak_reserved_bytes: Peak device memory that torch's caching allocator reserves, without the arena.
        arena_reserved_bytes: Peak device memory that is reserved if the arena serves the step; None: the arena does not
            serve.
        arena_bytes: Device memory of the arena alone; 0: the arena does not serve.
        arena_room_bytes: The part of the arena for dynamic requests, whose sizes differ from step to step.
        arena_off_because: Why the arena does not serve; "" if it serves.
        host_bytes: Pinned host memory that memplug uses.
        to_host_bytes: Bytes that memplug copies from device to host in the step.
        to_device_bytes: Bytes that memplug copies from host to device in the step.
        bound: The step's bottleneck: "compute", "link", "collectives" or "host".
        fits: Whether the GPU has enough memory for the reserved bytes.
        spans: Spans of all streams, in the order in which the host queued them.
        schedule_s: Seconds of the step that forward and backward of all micro-batches take; None: the training does not
            measure them.
        bubble_s: Seconds of the step in which the slowest stage of a pipeline waits for other stages.
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
    arena_bytes: int = 0
    arena_room_bytes: int = 0


@dataclass(frozen=True)
class Estimate(Mapping[str, ModeEstimate]):
    """The estimates of all modes; a mapping from mode to `ModeEstimate`.

    Attributes:
        hardware: The GPU's profile.
        modes: The estimate of each mode that could be estimated.
        impossible: The error of each mode for which no plan fits the budget.
        stages: For a pipeline, the estimate of each stage that ran, by stage number (`stages.py`); otherwise empty.
    """

    hardware: GpuProfile
    modes: Mapping[str, ModeEstimate]
    impossible: Mapping[str, BudgetError]
    stages: Mapping[int, Estimate] = field(default_factory=dict)

    def __getitem__(self, mode: str) -> ModeEstimate:
        """Return one mode's estimate."""
        return self.modes[mode]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the estimated modes."""
        return iter(self.modes)

    def __len__(self) -> int:
        """Return the number of estimated modes."""
        return len(self.modes)

    def over_keep(self, mode: str) -> float | None:
        """Return the ratio of a mode's step time to the step time of "keep"; None if "keep" was not estimated."""
        return self[mode].step_s / self["keep"].step_s if "keep" in self else None

    def utilization(self, mode: str, peak_flops: float) -> float | None:
        """Return the model FLOP/s utilization; None if "keep" was not estimated.

        The utilization counts the operations of mode "keep", so recomputed operations do not count.

        Args:
            mode: The mode's name.
            peak_flops: The GPU's peak rate, in floating-point operations per second.

        Returns:
            A fraction of `peak_flops`.
        """
        return self["keep"].flops / self[mode].step_s / peak_flops if "keep" in self else None
