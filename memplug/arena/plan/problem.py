"""What is to be placed and where it was placed: buffers with lifetimes and sizes, and an offset for each.

Offline Dynamic Storage Allocation (MEMO, section 4.2): every request's lifetime and size is known, its offset in one
arena is sought, and the arena should be no higher than need be. Lifetimes are half-open intervals on a clock of events.
The arrays are the storage; `Buffer` is a single row of them, for people and tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from memplug.errors import LayoutError
from memplug.profile.records import Fingerprint, Layer, Phase

BUFFER = np.dtype(
    [
        ("lower", "<i8"),  # in use from here
        ("upper", "<i8"),  # up to here, exclusive
        ("size", "<i8"),  # bytes
        ("alignment", "<i8"),  # the offset is a multiple of it
        ("stream", "<i4"),  # that it is asked for on
        ("lower_phase", "<i4"),  # into Problem.phases; -1: unknown
        ("upper_phase", "<i4"),
        ("lower_layer", "<i4"),  # into Problem.layers; -1: outside of layers, or unknown
        ("upper_layer", "<i4"),
        ("outlives", "?"),  # in use when the step ended: kept out of what others reuse
    ]
)
ORDERING = np.dtype(  # at `time`, stream `after` waits for all that stream `before` did up to then
    [("time", "<i8"), ("before", "<i4"), ("after", "<i4")]
)

LARGEST_BYTES = 2**60
"""Sizes, and their sum, stay below it: offsets are computed in int64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """One request: `size` bytes, in use in [lower, upper).

    Attributes:
        lower, upper: instants of the problem's clock.
        size: bytes.
        alignment: bytes; the offset is a multiple of it.
        stream: that it is asked for on.
        lower_phase, upper_phase, lower_layer, upper_layer: where it is asked for and freed; see `BUFFER`.
        outlives: in use when the step ended.
    """

    lower: int
    upper: int
    size: int
    alignment: int = 1
    stream: int = 0
    lower_phase: int = -1
    upper_phase: int = -1
    lower_layer: int = -1
    upper_layer: int = -1
    outlives: bool = False


def buffers(rows: list[Buffer] | np.ndarray) -> np.ndarray:
    """Of dtype BUFFER, from single buffers or from an int array [n, 3] of lower, upper and size."""
    if isinstance(rows, np.ndarray):
        table = np.zeros(len(rows), BUFFER)
        table["lower"], table["upper"], table["size"] = rows[:, 0], rows[:, 1], rows[:, 2]
        table["alignment"] = 1
        for column in ("lower_phase", "upper_phase", "lower_layer", "upper_layer"):
            table[column] = -1
        return table
    return np.array([tuple(getattr(row, name) for name in BUFFER.names) for row in rows], BUFFER)


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """Buffers to place. The arrays are read-only; a writeable one is copied.

    Buffers of different streams share bytes only where one is freed, then an ordering lets the other's stream wait,
    and then the other is asked for.

    Attributes:
        buffers: of dtype BUFFER.
        ids: what each buffer is called: int64, the running number of the request in its trace; or str, as in a CSV.
            By default its row.
        orderings: of dtype ORDERING, by time.
        phases, layers: what the columns of those names refer to.
        fingerprint: of the trace; empty where it does not come from one.

    Raises:
        LayoutError: A size, an alignment or a lifetime that cannot be; names the first such buffer.
    """

    buffers: np.ndarray
    ids: np.ndarray | None = None
    orderings: np.ndarray = field(default_factory=lambda: np.empty(0, ORDERING))
    phases: tuple[Phase, ...] = ()
    layers: tuple[Layer, ...] = ()
    fingerprint: Fingerprint = Fingerprint()

    def __post_init__(self) -> None:
        if self.ids is None:
            object.__setattr__(self, "ids", np.arange(len(self.buffers)))
        _check(self)
        for name in ("buffers", "ids", "orderings"):
            array = getattr(self, name)
            if array.flags.writeable:
                array = array.copy()
                array.flags.writeable = False
                object.__setattr__(self, name, array)

    def __len__(self) -> int:
        return len(self.buffers)

    def buffer(self, row: int) -> Buffer:
        """One row of `buffers`; IndexError: there is no such row."""
        return Buffer(**dict(zip(BUFFER.names, self.buffers[row].item(), strict=True)))

    def part(self, rows: np.ndarray) -> Problem:
        """The problem of some rows alone, in that order."""
        return Problem(
            buffers=self.buffers[rows],
            ids=self.ids[rows],
            orderings=self.orderings,
            phases=self.phases,
            layers=self.layers,
            fingerprint=self.fingerprint,
        )

    @cached_property
    def lower_bound(self) -> int:
        """Bytes that no solution can do without: the most that are in use at once."""
        return self._peak[1]

    @cached_property
    def main_stream(self) -> int:
        """The stream with the most bytes, of all requests together; 0 without any."""
        streams, of_buffer = np.unique(self.buffers["stream"], return_inverse=True)
        nbytes = np.bincount(of_buffer.reshape(-1), self.buffers["size"].astype(np.float64))
        return int(streams[nbytes.argmax()]) if len(streams) else 0

    def live_at_peak(self) -> np.ndarray:
        """Rows of what is in use at the first instant that reaches `lower_bound`: int64, the largest first."""
        time = self._peak[0]
        live = np.flatnonzero((self.buffers["lower"] <= time) & (time < self.buffers["upper"]))
        return live[np.argsort(-self.buffers["size"][live], kind="stable")]

    @cached_property
    def _peak(self) -> tuple[int, int]:
        times, live = live_bytes(self.buffers)
        at = int(live.argmax()) if live.size else -1
        return (int(times[at]), int(live[at])) if at >= 0 else (0, 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Solution:
    """An offset for every buffer of a problem.

    Attributes:
        offsets: int64[n], bytes from the beginning of the arena, aligned with `Problem.buffers`.
        height: bytes of the arena.
        planner: that found it.
        optimal: no lower solution exists: proven.
        seconds: that finding it took.
        timed_out: the time limit ended the search; this is the best so far.
    """

    offsets: np.ndarray
    height: int
    planner: str
    optimal: bool = False
    seconds: float = 0.0
    timed_out: bool = False


def solved(
    problem: Problem,
    offsets: np.ndarray,
    planner: str,
    *,
    proven: bool = False,
    seconds: float = 0.0,
    timed_out: bool = False,
) -> Solution:
    """A solution from its offsets: the height is that of the highest buffer, at the lower bound it is optimal."""
    height = int((offsets + problem.buffers["size"]).max(initial=0))
    return Solution(
        offsets=offsets,
        height=height,
        planner=planner,
        optimal=proven or height == problem.lower_bound,
        seconds=seconds,
        timed_out=timed_out,
    )


def live_bytes(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """When the bytes in use change, and how many are from there on: int64 each, times rising.

    Args:
        table: of dtype BUFFER.
    """
    times = np.concatenate([table["lower"], table["upper"]])
    changes = np.concatenate([table["size"], -table["size"]])
    instants, inverse = np.unique(times, return_inverse=True)
    sums = np.zeros(len(instants), np.int64)
    np.add.at(sums, inverse, changes)
    return instants, sums.cumsum()


def fragmentation(lower_bound_bytes: int, height_bytes: int) -> float:
    """Share of the arena that is of no use at the peak: 1 - lower bound / height, in [0, 1)."""
    return 1 - lower_bound_bytes / height_bytes if height_bytes else 0.0


def time_memory_product(table: np.ndarray, offsets: np.ndarray) -> float:
    """Share of a block's bytes times its duration that is in use, in (0, 1] (STWeaver, Eq. 1).

    The block reaches from the lowest offset to the highest end, and from the first lower to the last upper. Without
    buffers: 1.

    Args:
        table: of dtype BUFFER.
        offsets: int64[n].
    """
    if not len(table):
        return 1.0
    used = float((table["size"].astype(np.float64) * (table["upper"] - table["lower"])).sum())
    height = int((offsets + table["size"]).max() - offsets.min())
    return used / (float(height) * int(table["upper"].max() - table["lower"].min()))


def _check(problem: Problem) -> None:
    table, ids, orderings = problem.buffers, problem.ids, problem.orderings
    assert table.dtype == BUFFER and table.ndim == 1, "an array of dtype BUFFER"
    assert orderings.dtype == ORDERING and orderings.ndim == 1, "an array of dtype ORDERING"
    assert len(ids) == len(table), "an id for each buffer"
    problems = (
        ("is of {size} bytes: sizes are above 0", table["size"] <= 0),
        ("is of {size} bytes, more than fits", table["size"] >= LARGEST_BYTES),
        ("lives from {lower} up to {upper}: no time at all", table["upper"] <= table["lower"]),
        ("has alignment {alignment}, which is not above 0", table["alignment"] <= 0),
    )
    for problem_of_it, wrong in problems:
        if wrong.any():
            row = int(wrong.argmax())
            values = dict(zip(BUFFER.names, table[row].item(), strict=True))
            raise LayoutError(f"buffer {ids[row]} {problem_of_it.format(**values)}")
    if float(table["size"].sum(dtype=np.float64)) >= LARGEST_BYTES:
        raise LayoutError("the buffers are of more bytes together than fit an int64")
    if len(orderings) and (np.diff(orderings["time"]) < 0).any():
        raise LayoutError("the orderings of streams are not in the order of time")
