"""The layout problem and its solution: buffers with lifetimes and sizes, and an offset for each.

Offline Dynamic Storage Allocation (MEMO, section 4.2): given the lifetime and size of every request, find offsets in
one arena that make its height, the bytes that it needs, as small as possible. Lifetimes are half-open intervals on a
clock of events. A problem stores its buffers as a table; a `Buffer` is one row of it, for people and tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from memplug.errors import LayoutError
from memplug.profile.records import Fingerprint, Layer, Phase
from memplug.profile.requests import micro_batches
from memplug.profile.scaling import CONSTANT, Term

BUFFER = np.dtype(
    [
        ("lower", "<i8"),  # first instant of use
        ("upper", "<i8"),  # end of use, exclusive
        ("size", "<i8"),  # bytes
        ("alignment", "<i8"),  # the offset is a multiple of it
        ("stream", "<i4"),  # the stream that requests it
        ("lower_phase", "<i4"),  # index into Problem.phases; -1: unknown
        ("upper_phase", "<i4"),
        ("lower_layer", "<i4"),  # index into Problem.layers; -1: outside of layers, or unknown
        ("upper_layer", "<i4"),
        ("outlives", "?"),  # still in use when the step ends: shares no bytes
        ("room", "?"),  # no request: bytes for dynamic requests, whose sizes are known only at run time
        # where the size follows from a step's inputs, `size` is the largest; else 0 (`memplug.profile.scaling`)
        ("term", "<i4"),  # index into Problem.terms; CONSTANT or BOUNDED
        ("base", "<i8"),  # bytes: what is requested is base + factor * term
        ("factor", "<i8"),
    ]
)
ORDERING = np.dtype(  # at `time`, stream `after` waits for all work of stream `before` so far
    [("time", "<i8"), ("before", "<i4"), ("after", "<i4")]
)

LARGEST_BYTES = 2**60
"""Upper bound of each size and of their sum, since offsets are computed in int64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """One request: `size` bytes, in use in [lower, upper).

    Attributes:
        lower, upper: instants of the problem's clock.
        size: bytes.
        alignment: bytes; the offset is a multiple of it.
        stream: the stream that requests it.
        lower_phase, upper_phase, lower_layer, upper_layer: where it is requested and freed; see `BUFFER`.
        outlives: whether it is still in use when the step ends.
        room: whether it is no request, but bytes for dynamic requests.
        term, base, factor: how its size follows from a step's inputs; see `BUFFER`.
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
    room: bool = False
    term: int = CONSTANT
    base: int = 0
    factor: int = 0


def buffers(rows: list[Buffer] | np.ndarray) -> np.ndarray:
    """Return a table of dtype BUFFER from single buffers, or from an int array [n, 3] of lower, upper and size."""
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
    """Buffers to place. The arrays are read-only; the constructor copies writeable ones.

    Buffers of different streams may share bytes only if, in this order, one is freed, an ordering makes the other's
    stream wait, and the other is requested.

    Attributes:
        buffers: of dtype BUFFER.
        ids: names of the buffers: int64, the numbers of their requests in a trace; or str, as in a CSV. By default
            the row numbers.
        orderings: of dtype ORDERING, sorted by time.
        phases, layers: the phases and layers that columns of `buffers` index.
        terms: products of the sizes of a step's inputs, which the column `term` of `buffers` indexes.
        fingerprint: of the trace; empty if the problem does not come from a trace.

    Raises:
        LayoutError: a buffer's size, alignment or lifetime is impossible (the error names the first such buffer), the
            sizes together are too large, or `orderings` is not sorted.
    """

    buffers: np.ndarray
    ids: np.ndarray | None = None
    orderings: np.ndarray = field(default_factory=lambda: np.empty(0, ORDERING))
    phases: tuple[Phase, ...] = ()
    layers: tuple[Layer, ...] = ()
    terms: tuple[Term, ...] = ((),)
    fingerprint: Fingerprint = Fingerprint()

    def __post_init__(self) -> None:
        """Check the buffers, and make the arrays read-only."""
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
        """Return the number of buffers."""
        return len(self.buffers)

    @property
    def requests(self) -> int:
        """Return the number of buffers that are requests, and not rooms."""
        return int((~self.buffers["room"]).sum())

    @cached_property
    def requested_peak_bytes(self) -> int:
        """Return the most bytes that requests have in use at once; rooms do not count."""
        return int(live_bytes(self.buffers[~self.buffers["room"]])[1].max(initial=0))

    @cached_property
    def room_bytes(self) -> int:
        """Return the most bytes that rooms have at once; 0 without rooms."""
        return int(live_bytes(self.buffers[self.buffers["room"]])[1].max(initial=0))

    @cached_property
    def micro_batch(self) -> np.ndarray:
        """Return the micro-batch of each buffer's request; between passes, that of the forward before. int64[n]."""
        return micro_batches(self.phases, self.buffers["lower_phase"])

    @property
    def largest_bytes(self) -> int:
        """Return the bytes of the largest request; 0 without requests."""
        return int(self.buffers["size"][~self.buffers["room"]].max(initial=0))

    def buffer(self, row: int) -> Buffer:
        """Return one row of `buffers`.

        Raises:
            IndexError: there is no such row.
        """
        return Buffer(**dict(zip(BUFFER.names, self.buffers[row].item(), strict=True)))

    def part(self, rows: np.ndarray) -> Problem:
        """Return the problem of these rows alone, in that order."""
        return Problem(
            buffers=self.buffers[rows],
            ids=self.ids[rows],
            orderings=self.orderings,
            phases=self.phases,
            layers=self.layers,
            terms=self.terms,
            fingerprint=self.fingerprint,
        )

    def with_more(self, table: np.ndarray) -> Problem:
        """Return the problem of a trace with more buffers, of dtype BUFFER; their ids are below all others and 0."""
        ids = min(0, int(self.ids.min(initial=0))) - 1 - np.arange(len(table))
        return replace(self, buffers=np.concatenate([self.buffers, table]), ids=np.concatenate([self.ids, ids]))

    @cached_property
    def lower_bound(self) -> int:
        """Return the most bytes in use at once: no solution can be lower."""
        return self._peak[1]

    @cached_property
    def main_stream(self) -> int:
        """Return the stream whose requests have the most bytes in total; 0 without requests."""
        streams, of_buffer = np.unique(self.buffers["stream"], return_inverse=True)
        nbytes = np.bincount(of_buffer.reshape(-1), self.buffers["size"].astype(np.float64))
        return int(streams[nbytes.argmax()]) if len(streams) else 0

    def live_at_peak(self) -> np.ndarray:
        """Return the rows in use at the first instant that reaches `lower_bound`. int64, the largest first."""
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
        offsets: int64[n], bytes from the beginning of the arena, in the order of `Problem.buffers`.
        height: bytes of the arena.
        planner: name of the planner that found it.
        optimal: whether it is proven that no lower solution exists.
        seconds: time that finding it took.
        timed_out: whether the time limit ended the search; the solution is then the best so far.
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
    """Return a solution with these offsets; it is optimal if `proven`, or if its height is the lower bound."""
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
    """Return the sorted instants at which bytes in use may change, and the bytes in use from each on. int64 each.

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
    """Return the share of the arena that is unused at the peak: 1 - lower bound / height, in [0, 1)."""
    return 1 - lower_bound_bytes / height_bytes if height_bytes else 0.0


def time_memory_product(table: np.ndarray, offsets: np.ndarray) -> float:
    """Return the share of their bounding rectangle that the buffers use, in (0, 1] (STWeaver, Eq. 1).

    The rectangle (bytes times duration) reaches from the lowest offset to the highest end, and from the first lower to
    the last upper. Without buffers the share is 1.

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
        ("has {size} bytes: sizes are above 0", table["size"] <= 0),
        ("has {size} bytes: sizes are below 2**60", table["size"] >= LARGEST_BYTES),
        ("lives from {lower} up to {upper}: no time at all", table["upper"] <= table["lower"]),
        ("has alignment {alignment}, which is not above 0", table["alignment"] <= 0),
    )
    for problem_of_it, wrong in problems:
        if wrong.any():
            row = int(wrong.argmax())
            values = dict(zip(BUFFER.names, table[row].item(), strict=True))
            raise LayoutError(f"buffer {ids[row]} {problem_of_it.format(**values)}")
    if float(table["size"].sum(dtype=np.float64)) >= LARGEST_BYTES:
        raise LayoutError("the buffers have 2**60 bytes or more together")
    if len(orderings) and (np.diff(orderings["time"]) < 0).any():
        raise LayoutError("the orderings of streams are not in the order of time")
