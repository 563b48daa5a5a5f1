"""The search for the longest sequence and the largest micro-batch that fit a GPU in one mode.

The search varies one count: tokens in a sequence, or sequences in a micro-batch. For each count it runs a step of the
whole model. Memory rises nearly linearly with the count, so a line through two results gives the next count to try. The
search ends when the largest count that fits is close to one that does not fit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

from memplug.config import MemplugConfig
from memplug.device.capacity import granted_bytes
from memplug.predict.estimator.estimate import estimate_workload
from memplug.predict.estimator.request import EstimateRequest
from memplug.predict.estimator.workload import Workload
from memplug.predict.virtual import GpuProfile
from memplug.sizes import GIB

SEQ_LEN_STEP = 256  # tokens
NO_BUDGET_GIB = 1e-3
PRECISION = 32
MOST_STEPS = 16  # upper limit for one search
MOST_GROWTH = 4  # largest factor from one count to the next: a line through small counts can overshoot by far
Say = Callable[[str], None]


def _nothing(words: str) -> None:
    """Ignore a progress message; the default of `say`."""


class LimitSearch:
    """Searches the limits of one mode; a step that both searches need runs only once.

    Args:
        workload: The model and batch. The searches begin at its `seq_len` and `micro_batch`.
        request: Supplies the block, the GPU, the host memory and the attention back end; other fields are ignored.
        mode: The mode's name.
        say: Called before each step with a progress message: the step's number, the largest possible number of steps,
            and the sequence length or micro-batch that is tried.
    """

    def __init__(self, workload: Workload, request: EstimateRequest, mode: str, say: Say = _nothing):
        self._workload, self._request, self._mode, self._say = workload, request, mode, say
        self._capacity_bytes = capacity_bytes(request.hardware, request.config, mode)
        self._taken: dict[tuple[int, int], float] = {}
        self._longest: int | None = None

    def longest(self) -> int:
        """Return the length of the longest sequence that fits.

        Returns:
            Tokens, a multiple of `SEQ_LEN_STEP`; 0: no sequence fits.
        """
        begin = max(1, self._workload.seq_len // SEQ_LEN_STEP)
        numbers = iter(range(1, MOST_STEPS + 1))

        def bytes_of(count: int) -> float:
            tokens = count * SEQ_LEN_STEP
            return self._bytes_of(tokens, self._workload.micro_batch, f"a sequence of {tokens:,} tokens", numbers)

        self._longest = SEQ_LEN_STEP * largest(bytes_of, begin, begin, self._capacity_bytes)
        return self._longest

    def largest_batch(self) -> int:
        """Return the largest micro-batch that fits.

        If `longest` ran before, the search begins with about as many tokens in a micro-batch as `longest` found.

        Returns:
            Sequences; 0: no micro-batch fits.
        """
        begin = step = self._workload.micro_batch
        numbers = iter(range(1, MOST_STEPS + 1))
        if self._longest is not None:
            begin = max(1, begin * self._longest // self._workload.seq_len)
            step = precise(begin)

        def bytes_of(count: int) -> float:
            return self._bytes_of(self._workload.seq_len, count, f"a micro-batch of {count:,}", numbers)

        return largest(bytes_of, begin, step, self._capacity_bytes)

    def _bytes_of(self, seq_len: int, micro_batch: int, words: str, numbers: Iterator[int]) -> float:
        number = next(numbers)
        if (seq_len, micro_batch) not in self._taken:
            self._say(f"limits of {self._mode}, step {number} of at most {MOST_STEPS}: {words}")
            changed = dataclasses.replace(self._workload, seq_len=seq_len, micro_batch=micro_batch)
            self._taken[seq_len, micro_batch] = least_bytes(changed, self._request, self._mode)
        return self._taken[seq_len, micro_batch]


def capacity_bytes(hardware: GpuProfile, config: MemplugConfig, mode: str) -> float:
    """Return the device bytes that a step may use in this mode.

    In mode "memplug" this is the block's budget ("auto" leaves some of the device free). In other modes it is all of
    the device's memory.
    """
    if mode != "memplug":
        return hardware.memory_bytes
    return granted_bytes(config.device_budget_gib, hardware.memory_bytes)


def least_bytes(workload: Workload, request: EstimateRequest, mode: str) -> float:
    """Return the smallest number of device bytes in which a step fits in this mode.

    In mode "memplug" a step needs the least if memplug swaps or recomputes all activations inside of layers; it keeps
    those outside of layers. In other modes the result is the memory that torch's allocator reserves.
    """
    if mode == "memplug":
        config = request.config.with_only("tokenwise", "arena").model_copy(update={"device_budget_gib": NO_BUDGET_GIB})
    else:
        config = request.config.with_only()
    alone = dataclasses.replace(request, config=config, modes=(mode,), plan_dir=None)
    found = estimate_workload(workload, alone)
    if mode in found.impossible:
        return found.impossible[mode].least_gib * GIB
    return found[mode].peak_reserved_bytes


def precise(count: int) -> int:
    """Return the search's resolution: the gap that may remain between a count that fits and one that does not."""
    return max(1, count // PRECISION)


def largest(bytes_of: Callable[[int], float], begin: int, step: int, limit_bytes: float) -> int:
    """Return the largest count that was tried and whose step fits in the limit; 0 if none fits.

    The search ends when a count that does not fit is at most `precise` above one that fits, or after `MOST_STEPS`
    steps.

    Args:
        bytes_of: Returns the device bytes that a step needs at a count.
        begin: The first count to try.
        step: The distance from the first count to the second.
        limit_bytes: The device bytes that a step may use.
    """
    over: dict[int, float] = {}  # bytes beyond the limit (negative: below it), by count
    count, fits = begin, 0
    for _ in range(MOST_STEPS):
        over[count] = bytes_of(count) - limit_bytes
        fits = max((each for each in over if over[each] <= 0), default=0)
        fails = min((each for each in over if each > fits), default=None)
        if fails is not None and fails - fits <= precise(fits):
            break
        if fits and fails is not None:
            count = _between(over, fits, fails)
        elif len(over) == 1:
            count = fits + step if fits else max(1, count - step, count // MOST_GROWTH)
        else:
            count = _beyond(over, fits)
    return fits


def _between(over: dict[int, float], fits: int, fails: int) -> int:
    """Return the next count to try between one that fits and one that does not.

    Try the count at which a line through both results meets the limit. After every third step try the midpoint instead,
    because the line converges slowly where memory has a kink.
    """
    nearest = precise(fits)
    if len(over) % 3 == 0 or fails - fits <= 2 * nearest:
        return (fits + fails) // 2
    return min(max(_where_it_ends(over, fits, fails), fits + nearest), fails - nearest)


def _beyond(over: dict[int, float], fits: int) -> int:
    """Return the next count to try while all counts so far fit, or while none does."""
    ordered = sorted(over)
    ends = _where_it_ends(over, *(ordered[-2:] if fits else ordered[:2]))
    if fits:
        most = MOST_GROWTH * fits
        return most if ends is None else min(max(ends, fits + precise(fits)), most)
    least, most = max(1, ordered[0] // MOST_GROWTH), ordered[0] - precise(ordered[0])
    return least if ends is None else max(min(ends, most), least)


def _where_it_ends(over: dict[int, float], one: int, other: int) -> int | None:
    """Return the count at which a line through two results meets the limit; None if the line does not rise."""
    slope = (over[other] - over[one]) / (other - one)
    return one + math.floor(-over[one] / slope) if slope > 0 else None
