"""Random layout problems and plans, solutions that are always valid, and slow checks of their validity."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
from hypothesis import strategies as st

from memplug.arena.plan import search
from memplug.arena.plan.from_trace import last_step
from memplug.arena.plan.from_trace import problem_of as problem_of_trace
from memplug.arena.plan.part import AddressPlan, DynamicSpace, address_plan
from memplug.arena.plan.problem import BUFFER, ORDERING, Buffer, Problem, Solution, buffers, solved
from memplug.profile.records import Fingerprint, Layer, Pass, Phase
from memplug.profile.trace_file import load
from tests.support.folders import DATA

PHASES = (Phase(Pass.FORWARD, 0), Phase(Pass.BACKWARD, 0), Phase(Pass.OPTIMIZER))
LAYERS = (Layer("layers.0"), Layer("layers.1"), Layer("layers.1.mlp", dynamic=True))
TERMS = ((), (0,), (0, 1))


@st.composite
def problems(
    draw: st.DrawFn,
    most: int = 12,
    streams: int = 1,
    *,
    fewest: int = 0,
    latest: int = 16,
    largest: int = 12,
    alignments: tuple[int, ...] = (1, 1, 1, 2, 4, 3),
) -> Problem:
    """Draw `fewest` to `most` buffers in [0, latest) of at most `largest` bytes, on up to `streams` streams.

    Numbers are small, so that lifetimes, sizes and instants coincide. With several streams there are orderings too:
    some name streams without buffers, some share an instant, some come after the end. About half of the problems have
    phases and layers, drawn at random for each buffer. A buffer that outlives the step is in use during all of it.
    """
    count = draw(st.integers(fewest, most))  # drawn first: lists of unknown length turn out short
    named = draw(st.booleans())
    rows = [
        _row(draw, named, streams=streams, latest=latest, largest=largest, alignments=alignments) for _ in range(count)
    ]
    orderings = draw(_orderings(streams, latest)) if streams > 1 else []
    return Problem(
        buffers=np.array(rows, BUFFER),
        orderings=np.array(orderings, ORDERING),
        phases=PHASES if named else (),
        layers=LAYERS if named else (),
        terms=TERMS,
    )


def problem_of(*rows: tuple[int, ...], orderings=(), **fields) -> Problem:
    """Return a problem of buffers (lower, upper, size) or (lower, upper, size, stream)."""
    made = [Buffer(lower=row[0], upper=row[1], size=row[2], stream=(*row, 0)[3]) for row in rows]
    return Problem(buffers=buffers(made), orderings=np.array(list(orderings), ORDERING), **fields)


def at(problem: Problem, *offsets: int) -> Solution:
    """Return a solution of these offsets, valid or not."""
    return solved(problem, np.array(offsets, np.int64), "test")


def stacked(problem: Problem) -> Solution:
    """Return a solution with every buffer above the one before it, which is valid for any problem."""
    offsets, end = [], 0
    for size, alignment in problem.buffers[["size", "alignment"]].tolist():
        offsets.append(-(-end // alignment) * alignment)
        end = offsets[-1] + size
    return Solution(offsets=np.array(offsets, np.int64), height=end, planner="stacked")


def first_fit(problem: Problem, order: list[int]) -> Solution:
    """Place each buffer, in the given order of rows, at the lowest free offset: valid, and dense."""
    offsets = [-1] * len(problem)
    for row in order:
        buffer, taken = problem.buffer(row), []
        for other in range(len(problem)):
            placed = problem.buffer(other)
            apart = is_over_before(problem, buffer, placed) or is_over_before(problem, placed, buffer)
            if offsets[other] >= 0 and not apart:
                taken.append((offsets[other], offsets[other] + placed.size))
        ends = [0, *(-(-end // buffer.alignment) * buffer.alignment for _, end in taken)]
        offsets[row] = min(at for at in ends if all(at + buffer.size <= low or high <= at for low, high in taken))
    height = max((offset + problem.buffer(row).size for row, offset in enumerate(offsets)), default=0)
    return Solution(offsets=np.array(offsets, np.int64), height=height, planner="first fit")


@st.composite
def address_plans(
    draw: st.DrawFn, most: int = 8, streams: int = 1, *, fewest: int = 0, fewest_groups: int = 0
) -> AddressPlan:
    """Draw a valid plan of random buffers, with up to three dynamic groups that get all the free space."""
    problem = draw(problems(most, streams, fewest=fewest))
    problem = Problem(
        buffers=problem.buffers,
        ids=draw(st.sampled_from((problem.ids, problem.ids + 7, np.char.add("b", problem.ids.astype(np.str_))))),
        orderings=problem.orderings,
        phases=problem.phases,
        layers=problem.layers,
        terms=problem.terms,
        fingerprint=Fingerprint(model=draw(st.text(max_size=3)), inputs=("int64[1, 8]",), versions=(("torch", "2"),)),
    )
    solution = first_fit(problem, draw(st.permutations(range(len(problem)))))
    groups = tuple(_group(draw, problem, solution) for _ in range(draw(st.integers(fewest_groups, 3))))
    peaks = [group.peak_bytes for group in groups]
    dynamic_peak = draw(st.integers(max(peaks), sum(peaks))) if groups else 0
    return address_plan(problem, solution, groups, dynamic_peak)


def is_valid(problem: Problem, solution: Solution) -> bool:
    """Return whether a solution is valid, by the definition: pair by pair, however slow."""
    offsets = solution.offsets
    if not isinstance(offsets, np.ndarray) or offsets.dtype != np.int64 or offsets.shape != (len(problem),):
        return False
    placed = [(problem.buffer(row), offset) for row, offset in enumerate(offsets.tolist())]
    if any(offset < 0 or offset % buffer.alignment for buffer, offset in placed):
        return False
    if solution.height != max((offset + buffer.size for buffer, offset in placed), default=0):
        return False
    return all(
        offset + buffer.size <= other_offset
        or other_offset + other.size <= offset
        or is_over_before(problem, buffer, other)
        or is_over_before(problem, other, buffer)
        for (buffer, offset), (other, other_offset) in combinations(placed, 2)
    )


def is_over_before(problem: Problem, first: Buffer, second: Buffer) -> bool:
    """Return whether `first` is certainly free, on both streams, before `second` is requested."""
    if first.stream == second.stream:
        return first.upper <= second.lower
    reached = {first.stream}  # streams that are ordered after the free
    for time, before, after in problem.orderings.tolist():  # in the order of the rows, also within one instant
        if first.upper <= time <= second.lower and before in reached:
            reached.add(after)
    return second.stream in reached


def is_valid_plan(plan: AddressPlan) -> bool:
    """Return whether everything in a plan is valid, by the definitions and as slowly as `is_valid`."""
    problem, solution, promised = plan.problem, plan.solution, plan.predictions
    placed = [problem.buffer(row) for row in range(len(problem))]
    peak = max((sum(b.size for b in placed if b.lower <= a.lower < b.upper) for a in placed), default=0)
    peaks = [group.peak_bytes for group in plan.dynamic]
    asked = [b for b in placed if not b.room]
    in_use = max((sum(b.size for b in asked if b.lower <= a.lower < b.upper) for a in asked), default=0)
    return (
        is_valid(problem, solution)
        and all(-1 <= i < len(problem.phases) for b in placed for i in (b.lower_phase, b.upper_phase))
        and all(-1 <= i < len(problem.layers) for b in placed for i in (b.lower_layer, b.upper_layer))
        and all(_is_valid_scale(problem, buffer) for buffer in placed)
        and all(dimension >= 0 for term in problem.terms for dimension in term)
        and promised.arena_bytes == solution.height
        and promised.static_peak_bytes == peak
        and promised.fragmentation == (1 - peak / solution.height if placed else 0)
        and max(peaks, default=0) <= promised.dynamic_peak_bytes <= sum(peaks)
        and promised.live_peak_bytes >= max(in_use, promised.dynamic_peak_bytes)
        and all(_is_valid_group(plan, placed, group) for group in plan.dynamic)
    )


def _is_valid_scale(problem: Problem, buffer: Buffer) -> bool:
    if buffer.term > 0:
        return buffer.term < len(problem.terms) and buffer.base >= 0 and buffer.factor > 0
    return buffer.base == buffer.factor == 0 and (buffer.term == -1 or 0 <= buffer.term < len(problem.terms))


def _is_valid_group(plan: AddressPlan, placed: list[Buffer], group: DynamicSpace) -> bool:
    used = {
        byte
        for buffer, offset in zip(placed, plan.solution.offsets.tolist(), strict=True)
        if buffer.lower < group.upper and group.lower < buffer.upper and not buffer.room
        for byte in range(offset, offset + buffer.size)
    }
    return (
        all(-1 <= phase < len(plan.problem.phases) for phase in (group.malloc_phase, group.free_phase))
        and all(-1 <= layer < len(plan.problem.layers) for layer in (group.malloc_layer, group.free_layer))
        and 0 <= group.lower < group.upper
        and len(group.mallocs) > 0
        and all(group.lower <= malloc < group.upper for malloc in group.mallocs)
        and all(one < other for one, other in pairwise(group.mallocs))
        and group.peak_bytes >= 0
        and group.stream >= 0
        and 0 <= group.ceiling <= plan.solution.height
        and all(0 <= first < end <= plan.solution.height for first, end in group.spaces)
        and all(one[1] <= other[0] for one, other in pairwise(group.spaces))
        and not any(byte in used for space in group.spaces for byte in range(*space))
    )


def _group(draw: st.DrawFn, problem: Problem, solution: Solution) -> DynamicSpace:
    lower = draw(st.integers(0, 14))
    upper = draw(st.integers(lower + 1, 16))
    free = np.ones(solution.height + 1, bool)
    free[-1] = False
    for (begin, end, size, room), offset in zip(
        problem.buffers[["lower", "upper", "size", "room"]].tolist(), solution.offsets.tolist(), strict=True
    ):
        if begin < upper and lower < end and not room:
            free[offset : offset + size] = False
    edges = np.flatnonzero(np.diff(free, prepend=False)).tolist()
    phase, layer = st.integers(-1, len(problem.phases) - 1), st.integers(-1, len(problem.layers) - 1)
    return DynamicSpace(
        malloc_phase=draw(phase),
        malloc_layer=draw(layer),
        free_phase=draw(phase),
        free_layer=draw(layer),
        lower=lower,
        upper=upper,
        spaces=tuple(zip(edges[::2], edges[1::2], strict=True)),
        stream=draw(st.integers(0, 2)),
        mallocs=tuple(sorted(draw(st.sets(st.integers(lower, upper - 1), min_size=1, max_size=9)))),
        peak_bytes=draw(st.integers(0, 99)),
        ceiling=draw(st.integers(0, solution.height)),
    )


def _row(draw, named, *, streams, latest, largest, alignments) -> tuple:
    outlives = draw(st.sampled_from((False,) * 9 + (True,)))
    lower = 0 if outlives else draw(st.integers(0, latest - 1))
    upper = latest if outlives else draw(st.integers(lower + 1, latest))
    place = (st.integers(-1, len(PHASES) - 1), st.integers(-1, len(LAYERS) - 1)) if named else (st.just(-1),) * 2
    return (
        lower,
        upper,
        draw(st.integers(1, largest)),
        draw(st.sampled_from(alignments)),
        draw(st.integers(0, streams - 1)),
        *(draw(place[0]) for _ in range(2)),
        *(draw(place[1]) for _ in range(2)),
        outlives,
        not outlives and draw(st.sampled_from((False,) * 9 + (True,))),
        *draw(st.sampled_from(((0, 0, 0), (0, 0, 0), (-1, 0, 0), (1, 0, 3), (2, 5, 1)))),
    )


def _orderings(streams: int, latest: int) -> st.SearchStrategy:
    stream = st.integers(0, streams)  # includes one stream without buffers
    rows = st.lists(st.tuples(st.integers(0, latest), stream, stream), max_size=3 * streams)
    return rows.map(lambda drawn: sorted(drawn, key=lambda row: row[0]))


def recorded_plan() -> AddressPlan:
    """Return a plan for the last step of a trace of Llama 7B."""
    problem = problem_of_trace(last_step(load(DATA / "llama7b_long_ckpt.npz")))
    return address_plan(problem, search.solve(problem, improve=False))
