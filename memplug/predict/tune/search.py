"""The search: configurations of a training step, boxes of them, and the fastest that fit."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

Offload = Literal["none", "optimizer", "parameters"]
EXHAUSTIVE = 10_000
"""Spaces of at most as many configurations are searched one by one."""
AXES = ("n_persist", "n_buffer", "n_swap", "n_checkpoint")
"""ProTrain's four numbers."""
DEVICE, HOST = "more device memory than there is", "more host memory than there is"
SLOWER = "slower than those found, by a bound"


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Layout:
    """How a step is laid out over ranks and micro-batches.

    Attributes:
        stage: of ZeRO.
        offload: what is on the host: nothing, the optimizer and its states, or these and the parameters.
        micro_batch: sequences of one rank.
        accumulation: micro-batches of a step.
    """

    stage: int
    offload: Offload
    micro_batch: int
    accumulation: int


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Configuration:
    """A layout, and ProTrain's four numbers.

    Attributes:
        n_persist: chunks, the first ones, whose optimizer states are on the device.
        n_buffer: chunks, the last ones, that stay gathered from forward to backward.
        n_swap: blocks, the first ones, that swap what they save.
        n_checkpoint: blocks, the next ones, that recompute it; the others keep it.
    """

    layout: Layout
    n_persist: int
    n_buffer: int
    n_swap: int
    n_checkpoint: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Of one step.

    Attributes:
        step_s: seconds.
        tokens: of all ranks.
        device_bytes: the most that one rank has in use.
        host_bytes: of the machine, by all its ranks.
    """

    step_s: float
    tokens: int
    device_bytes: int
    host_bytes: int

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks."""
        return self.tokens / self.step_s

    @property
    def order(self) -> tuple[float, int, int]:
        """The least is the best: seconds of a token, then bytes of the device and of the host."""
        return self.step_s / self.tokens, self.device_bytes, self.host_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """Configurations of one layout: the four numbers have ranges, which are not empty.

    Attributes:
        blocks: there are so many; `n_swap` and `n_checkpoint` are not more together.
    """

    layout: Layout
    blocks: int
    n_persist: range
    n_buffer: range
    n_swap: range
    n_checkpoint: range

    def __len__(self) -> int:
        pairs = sum(
            max(0, min(self.n_checkpoint.stop, self.blocks - swap + 1) - self.n_checkpoint.start)
            for swap in self.n_swap
        )
        return len(self.n_persist) * len(self.n_buffer) * pairs

    def __iter__(self) -> Iterator[Configuration]:
        for numbers in itertools.product(*(getattr(self, axis) for axis in AXES)):
            if numbers[2] + numbers[3] <= self.blocks:
                yield Configuration(layout=self.layout, **dict(zip(AXES, numbers, strict=True)))

    def halves(self) -> tuple[Box, Box]:
        """Split at the middle of the longest range, which has to have two numbers at least."""
        axis = max(AXES, key=lambda name: len(getattr(self, name)))
        numbers = getattr(self, axis)
        middle = len(numbers) // 2
        return replace(self, **{axis: numbers[:middle]}), replace(self, **{axis: numbers[middle:]})


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step may take: of the device of one rank, and of the host of a machine."""

    device_bytes: float
    host_bytes: float

    def exceeded(self, prediction: Prediction) -> str | None:
        """The first that is, in words; None: it fits."""
        if prediction.device_bytes > self.device_bytes:
            return DEVICE
        return HOST if prediction.host_bytes > self.host_bytes else None


class Estimator(Protocol):
    """What a step takes."""

    def predict(self, configuration: Configuration) -> Prediction:
        """Of one configuration."""
        ...

    def least(self, box: Box) -> Prediction:
        """A lower bound for a box: no configuration of it has less seconds, less device bytes or less host bytes; the
        three may be of different ones. Tokens are the box's.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a search found.

    Attributes:
        best: the fastest that fit, the best first.
        fits: configurations that fit and are not among them, of those that were examined.
        ruled_out: configurations by reason; those of `fits` and `best` are none of them.
        predicted: configurations whose prediction was made.
    """

    best: tuple[tuple[Configuration, Prediction], ...]
    fits: int = 0
    ruled_out: Counter[str] = field(default_factory=Counter)
    predicted: int = 0


Order = Callable[[Prediction], tuple[float, ...]]


def search(
    boxes: Sequence[Box],
    estimator: Estimator,
    limits: Limits,
    count: int,
    *,
    exhaustive: int = EXHAUSTIVE,
    order: Order = lambda prediction: prediction.order,
) -> Found:
    """The best that fit, in that order, of equal ones the first by their numbers.

    Up to `exhaustive` configurations are predicted one by one. Of more of them, a box is predicted as a whole: where
    its least memory is more than a limit, no configuration of it fits, and where its least order is not below that of
    the worst of `count` found ones, none of it is better. Else it is halved, down to one configuration. Both are safe
    as long as `least` is a lower bound. Memory never shrinks as more chunks persist or are buffered, and never grows as
    more blocks swap or checkpoint; the time of a step never grows with buffers and never shrinks with blocks that
    checkpoint: so bounds are those of a box's corners. Boxes are taken in the order of their bounds, so that none is
    halved whose bound is above the answer's.

    Args:
        order: a tuple that grows, or stays, with each figure of a prediction.
    """
    if sum(map(len, boxes)) <= exhaustive:
        return _one_by_one(boxes, estimator, limits, count, order)
    return _by_bounds(boxes, estimator, limits, count, order)


def _one_by_one(boxes: Sequence[Box], estimator: Estimator, limits: Limits, count: int, order: Order) -> Found:
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
    return Found(best=pairs, fits=len(fitting) - len(best), ruled_out=ruled_out, predicted=predicted)


def _by_bounds(boxes: Sequence[Box], estimator: Estimator, limits: Limits, count: int, order: Order) -> Found:
    """A heap has boxes by their bounds, and single configurations by their predictions, which come behind boxes of the
    same bound: one that is popped is better than all that are left.
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
    return Found(best=tuple(best), fits=len(singles), ruled_out=ruled_out, predicted=predicted)


def least_memory(
    boxes: Sequence[Box], estimator: Estimator, limits: Limits, *, exhaustive: int = EXHAUSTIVE
) -> tuple[Configuration, Prediction]:
    """The configuration that takes the least device memory of those whose host memory fits; where none does, the one
    that takes the least host memory. At least one box has to have a configuration.
    """
    on_device = search(
        boxes,
        estimator,
        Limits(float("inf"), limits.host_bytes),
        1,
        exhaustive=exhaustive,
        order=lambda prediction: (prediction.device_bytes, *prediction.order),
    )
    if on_device.best:
        return on_device.best[0]
    on_host = search(
        boxes,
        estimator,
        Limits(float("inf"), float("inf")),
        1,
        exhaustive=exhaustive,
        order=lambda prediction: (prediction.host_bytes, prediction.device_bytes, prediction.step_s),
    )
    return on_host.best[0]
