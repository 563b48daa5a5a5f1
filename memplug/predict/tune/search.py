"""The search for the fastest configurations that fit a GPU and its host, by branch and bound."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

Offload = Literal["none", "optimizer", "parameters"]
EXHAUSTIVE = 10_000
"""Up to this many configurations are predicted one by one; more are searched by branch and bound."""
AXES = ("n_persist", "n_buffer", "n_swap", "n_checkpoint")
"""ProTrain's four numbers."""
DEVICE, HOST = "more device memory than available", "more host memory than available"
SLOWER = "slower than the best configurations, by a lower bound of their time"


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class StepLayout:
    """The layout of a step over ranks and micro-batches.

    Attributes:
        stage: The ZeRO stage.
        offload: "none"; "optimizer": the optimizer and its states are on the host; "parameters": the parameters too.
        micro_batch: Sequences in a micro-batch of one rank.
        accumulation: Micro-batches in a step.
    """

    stage: int
    offload: Offload
    micro_batch: int
    accumulation: int


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Configuration:
    """A layout with ProTrain's four numbers.

    Attributes:
        layout: The layout.
        n_persist: The number of chunks, from the first, with optimizer states on the device.
        n_buffer: The number of chunks, from the last, that stay gathered from forward to backward.
        n_swap: The number of blocks, from the first, that swap their saved activations.
        n_checkpoint: The number of blocks, after the swapping ones, that recompute their saved activations. All further
            blocks keep their activations.
    """

    layout: StepLayout
    n_persist: int
    n_buffer: int
    n_swap: int
    n_checkpoint: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The predicted time and memory of one step.

    Attributes:
        step_s: Duration of the step, in seconds.
        tokens: Tokens that all ranks together train in a step.
        device_bytes: Peak device memory of one rank.
        host_bytes: Host memory of the machine, for all its ranks.
    """

    step_s: float
    tokens: int
    device_bytes: int
    host_bytes: int

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens that all ranks together train in a second."""
        return self.tokens / self.step_s

    @property
    def order(self) -> tuple[float, int, int]:
        """Return the sort key: seconds per token, then device bytes, then host bytes; the least key is best."""
        return self.step_s / self.tokens, self.device_bytes, self.host_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """The configurations of one layout whose four numbers lie in the box's ranges.

    Attributes:
        layout: The layout.
        blocks: The number of the model's blocks; in a configuration, `n_swap + n_checkpoint` is at most this.
        n_persist: Range of `Configuration.n_persist`.
        n_buffer: Range of `Configuration.n_buffer`.
        n_swap: Range of `Configuration.n_swap`.
        n_checkpoint: Range of `Configuration.n_checkpoint`.
    """

    layout: StepLayout
    blocks: int
    n_persist: range
    n_buffer: range
    n_swap: range
    n_checkpoint: range

    def __len__(self) -> int:
        """Return the number of configurations."""
        pairs = sum(
            max(0, min(self.n_checkpoint.stop, self.blocks - swap + 1) - self.n_checkpoint.start)
            for swap in self.n_swap
        )
        return len(self.n_persist) * len(self.n_buffer) * pairs

    def __iter__(self) -> Iterator[Configuration]:
        """Iterate over the configurations."""
        for numbers in itertools.product(*(getattr(self, axis) for axis in AXES)):
            if numbers[2] + numbers[3] <= self.blocks:
                yield Configuration(layout=self.layout, **dict(zip(AXES, numbers, strict=True)))

    def halves(self) -> tuple[Box, Box]:
        """Split the box at the middle of its longest range, which must have at least two numbers."""
        axis = max(AXES, key=lambda name: len(getattr(self, name)))
        numbers = getattr(self, axis)
        middle = len(numbers) // 2
        return replace(self, **{axis: numbers[:middle]}), replace(self, **{axis: numbers[middle:]})


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """The memory that a step may use.

    Attributes:
        device_bytes: Device memory of one rank.
        host_bytes: Host memory of the machine.
    """

    device_bytes: float
    host_bytes: float

    def exceeded(self, prediction: Prediction) -> str | None:
        """Return the limit that a prediction exceeds, in words: `DEVICE` if it exceeds both, None if neither."""
        if prediction.device_bytes > self.device_bytes:
            return DEVICE
        return HOST if prediction.host_bytes > self.host_bytes else None


class Estimator(Protocol):
    """Predicts time and memory of configurations."""

    def predict(self, configuration: Configuration) -> Prediction:
        """Predict one configuration."""
        ...

    def least(self, box: Box) -> Prediction:
        """Return a lower bound for all configurations of a box.

        No configuration of the box takes fewer seconds, device bytes or host bytes than the bound; perhaps none reaches
        it. All configurations of a box have the same number of tokens.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """The result of a search.

    Attributes:
        best: Pairs of configuration and prediction: the best configurations that fit, best first.
        fits: The number of predicted configurations that fit but are not among `best`.
        ruled_out: The number of configurations that were ruled out, by reason; none of them counts in `fits`.
        predicted: The number of configurations that were predicted one by one.
    """

    best: tuple[tuple[Configuration, Prediction], ...]
    fits: int = 0
    ruled_out: Counter[str] = field(default_factory=Counter)
    predicted: int = 0


Order = Callable[[Prediction], tuple[float, ...]]


def search(
    boxes: Sequence[Box],
    estimator: Estimator,
    limits: MemoryLimits,
    count: int,
    *,
    exhaustive: int = EXHAUSTIVE,
    order: Order = lambda prediction: prediction.order,
) -> SearchResult:
    """Return the best configurations that fit; of equally good ones, those with smaller numbers.

    Up to `exhaustive` configurations are predicted one by one. A larger space is searched by branch and bound. A box
    whose bound exceeds a memory limit is ruled out, because none of its configurations fits. Of the other boxes, the
    one with the best bound is halved next, down to single configurations. The search ends when it has found `count`
    configurations: no configuration of a remaining box is better. The result is exact as long as `Estimator.least`
    returns a lower bound.

    An estimator can compute its bounds at a box's corners, because time and memory are monotonic. Device memory rises
    with the chunks that persist or are buffered, and falls with the blocks that swap or checkpoint, apart from the
    buffers for swapping. Host memory falls with the chunks that persist, and rises with the blocks that swap. Time
    falls with the chunks that are buffered, and rises with the blocks that checkpoint.

    Args:
        boxes: The search space.
        estimator: Predicts configurations and bounds boxes.
        limits: The memory that a step may use.
        count: The number of configurations to return.
        exhaustive: The largest space that is searched one by one.
        order: Returns the sort key of a prediction. The key must not decrease if the prediction's seconds, device bytes
            or host bytes increase.
    """
    if sum(map(len, boxes)) <= exhaustive:
        return _one_by_one(boxes, estimator, limits, count, order)
    return _by_bounds(boxes, estimator, limits, count, order)


def _one_by_one(
    boxes: Sequence[Box], estimator: Estimator, limits: MemoryLimits, count: int, order: Order
) -> SearchResult:
    fitting, ruled_out, predicted = [], Counter(), 0
    for configuration in itertools.chain.from_iterable(boxes):
        prediction = estimator.predict(configuration)
        predicted += 1
        reason = limits.exceeded(prediction)
        if reason is None:
            fitting.append((order(prediction), configuration, prediction))
        else:
            ruled_out[reason] += 1
    best = heapq.nsmallest(count, fitting, key=lambda each: each[:2])
    pairs = tuple((configuration, prediction) for _, configuration, prediction in best)
    return SearchResult(best=pairs, fits=len(fitting) - len(best), ruled_out=ruled_out, predicted=predicted)


def _by_bounds(
    boxes: Sequence[Box], estimator: Estimator, limits: MemoryLimits, count: int, order: Order
) -> SearchResult:
    """Search by branch and bound.

    The heap orders boxes by their bounds and single configurations by their predictions, boxes first if equal. So a
    configuration that is popped is at least as good as all that the heap still holds.
    """
    heap: list[tuple[tuple[float, ...], tuple[int, Configuration | int], Box | Prediction]] = []
    ruled_out: Counter[str] = Counter()
    numbers, predicted = itertools.count(), 0

    def push(box: Box) -> None:
        nonlocal predicted
        size = len(box)
        if size == 0:
            return
        if size == 1:
            (configuration,) = box
            prediction, place = estimator.predict(configuration), (1, configuration)
            predicted += 1
        else:
            prediction, place = estimator.least(box), (0, next(numbers))
        reason = limits.exceeded(prediction)
        if reason is not None:
            ruled_out[reason] += size
        else:
            heapq.heappush(heap, (order(prediction), place, prediction if size == 1 else box))

    for box in boxes:
        push(box)
    best: list[tuple[Configuration, Prediction]] = []
    while heap and len(best) < count:
        _, place, popped = heapq.heappop(heap)
        if isinstance(popped, Box):
            for half in popped.halves():
                push(half)
        else:
            best.append((place[1], popped))
    singles = [item for _, _, item in heap if isinstance(item, Prediction)]
    rest = sum(len(item) for _, _, item in heap if isinstance(item, Box))
    if rest:
        ruled_out[SLOWER] += rest
    return SearchResult(best=tuple(best), fits=len(singles), ruled_out=ruled_out, predicted=predicted)


def least_memory(
    boxes: Sequence[Box], estimator: Estimator, limits: MemoryLimits, *, exhaustive: int = EXHAUSTIVE
) -> tuple[Configuration, Prediction]:
    """Return the configuration with the least device memory within the limit of host memory.

    If every configuration exceeds the limit of host memory, return the one with the least host memory.

    Args:
        boxes: The search space; at least one configuration.
        estimator: Predicts configurations and bounds boxes.
        limits: Only `host_bytes` is used.
        exhaustive: The largest space that is searched one by one.
    """
    on_device = search(
        boxes,
        estimator,
        MemoryLimits(float("inf"), limits.host_bytes),
        1,
        exhaustive=exhaustive,
        order=lambda prediction: (prediction.device_bytes, *prediction.order),
    )
    if on_device.best:
        return on_device.best[0]
    on_host = search(
        boxes,
        estimator,
        MemoryLimits(float("inf"), float("inf")),
        1,
        exhaustive=exhaustive,
        order=lambda prediction: (prediction.host_bytes, prediction.device_bytes, prediction.step_s),
    )
    return on_host.best[0]
