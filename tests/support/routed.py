"""Steps of small mixtures of experts whose sizes a drawn routing decides, and a model of the arena that serves them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from memplug.arena.plan.part import AddressPlan
from memplug.profile.trace import EventKind, Layer, Pass, Phase, Trace
from memplug.sizes import BLOCK_BYTES, rounded_up
from tests.support.traces import Recording


@dataclasses.dataclass(frozen=True)
class Mixture:
    """A program: its layers make planned requests, and dynamic ones for each expert that got tokens.

    Attributes:
        layers: number of layers.
        experts: experts of each layer.
        tokens: tokens that each layer divides among its experts.
        saved: bytes per token of each tensor that an expert saves for backward.
        scratch: bytes per token of each tensor that lives only within an expert.
        planned: bytes of each planned tensor of a layer; every second one is saved for backward.
        skew: the larger, the more alike are the experts' shares of the tokens.
    """

    layers: int
    experts: int
    tokens: int
    saved: tuple[int, ...]
    scratch: tuple[int, ...]
    planned: tuple[int, ...]
    skew: float

    @classmethod
    def drawn(cls, random: np.random.Generator) -> Mixture:
        """Return a random program."""

        def sizes(most: int, unit: int) -> tuple[int, ...]:
            return tuple((unit * random.integers(1, 17, random.integers(1, most + 1))).tolist())

        return cls(
            layers=int(random.integers(3, 9)),
            experts=int(random.integers(2, 9)),
            tokens=int(random.integers(200, 2000)),
            saved=sizes(3, 32),
            scratch=sizes(3, 32),
            planned=sizes(4, 16 << 10),
            skew=float(random.uniform(1, 50)),
        )

    def step(self, random: np.random.Generator) -> Trace:
        """Return one step, with its routing drawn."""
        recording = Recording()
        recording.step()
        kept: list[list[tuple[bool, int]]] = []
        for layer in range(self.layers):
            recording.phase(Pass.FORWARD, 0)
            recording.layer(f"layers.{layer}")
            own = [(number % 2 == 0, self._malloc(recording, nbytes)) for number, nbytes in enumerate(self.planned)]
            saved = [(False, request) for is_kept, request in own if is_kept]
            shares = random.multinomial(self.tokens, random.dirichlet(np.full(self.experts, self.skew)))
            recording.layer(f"layers.{layer}.experts", dynamic=True)
            for tokens in shares[shares > 0].tolist():
                scratch = [self._malloc(recording, tokens * each) for each in self.scratch]
                saved += [(True, self._malloc(recording, tokens * each)) for each in self.saved]
                for request in scratch:
                    recording.free(request)
            recording.layer(f"layers.{layer}")
            for is_kept, request in own:
                if not is_kept:
                    recording.free(request)
            kept.append(saved)
        for layer in reversed(range(self.layers)):
            recording.phase(Pass.BACKWARD, 0)
            for is_experts, request in reversed(kept[layer]):
                recording.layer(f"layers.{layer}" + ".experts" * is_experts, dynamic=is_experts)
                nbytes = recording.events[[at for at, each in enumerate(recording.events) if each[1] == request][0]][2]
                gradient = self._malloc(recording, nbytes)
                recording.free(request)
                recording.free(gradient)
        return recording.trace()

    def _malloc(self, recording: Recording, nbytes: int) -> int:
        recording.op("mm")
        return recording.malloc(nbytes)


@dataclasses.dataclass
class Served:
    """The memory that a step took.

    Attributes:
        live_bytes: the most bytes in use at once.
        beside_bytes: the most bytes in use at once that torch's allocator served.
        dynamic_bytes: bytes of dynamic requests that the arena served.
        dynamic_missed_bytes: bytes of those that torch's allocator served.
        dynamic_missed_largest: bytes of the largest of those.
        occupied: planned requests whose bytes were in use.
    """

    live_bytes: int = 0
    beside_bytes: int = 0
    dynamic_bytes: int = 0
    dynamic_missed_bytes: int = 0
    dynamic_missed_largest: int = 0
    occupied: int = 0

    @property
    def missed(self) -> float:
        """Return the share of the dynamic requests' bytes that torch's allocator served."""
        return self.dynamic_missed_bytes / max(1, self.dynamic_bytes + self.dynamic_missed_bytes)


def serve(plan: AddressPlan, step: Trace) -> Served:
    """Serve a step as the arena does, request by request, and check that no two blocks ever share bytes."""
    rows, found = step.requests, Served()
    places = _Places(plan)
    blocks: dict[int, tuple[int, int]] = {}
    beside: dict[int, int] = {}
    for kind, request in step.events[["kind", "request"]].tolist():
        row = rows[request]
        size = int(rounded_up(row["nbytes"], BLOCK_BYTES))
        if kind == EventKind.FREE:
            blocks.pop(request, None)
            beside.pop(request, None)
            continue
        layer = int(row["malloc_layer"])
        place = step.phases[row["malloc_phase"]], step.layers[layer] if layer >= 0 else None
        used = sorted(blocks.values())
        begin = places.planned(place, size)
        if begin is None:
            begin = places.dynamic(place, size, used)
            found.dynamic_bytes += size * (begin is not None)
            found.dynamic_missed_bytes += size * (begin is None)
            found.dynamic_missed_largest = max(found.dynamic_missed_largest, size * (begin is None))
        elif any(low < begin + size and begin < high for low, high in used):
            begin, found.occupied = None, found.occupied + 1
        if begin is None:
            beside[request] = size
        else:
            assert not any(low < begin + size and begin < high for low, high in used), "two blocks share bytes"
            assert 0 <= begin and begin + size <= plan.solution.height
            blocks[request] = (begin, begin + size)
        own = sum(beside.values())
        found.beside_bytes = max(found.beside_bytes, own)
        found.live_bytes = max(found.live_bytes, own + sum(high - low for low, high in blocks.values()))
    return found


_Place = tuple[Phase, Layer | None]
_Group = tuple[Sequence[tuple[int, int]], int]  # spaces, and the ceiling


class _Places:
    """The requests that a plan expects at each place in a step."""

    def __init__(self, plan: AddressPlan):
        problem = plan.problem
        self._expected: dict[_Place, list[tuple[int, int]]] = {}  # size and offset
        self._next: dict[_Place, int] = {}
        self._served: set[tuple[_Place, int]] = set()
        self._groups: dict[_Place, list[_Group]] = {}
        self._turns: dict[_Place, int] = {}

        def named(phase: int, layer: int) -> _Place:
            return problem.phases[phase], problem.layers[layer] if layer >= 0 else None

        columns = problem.buffers[["size", "lower_phase", "lower_layer", "room"]].tolist()
        for (size, phase, layer, room), offset in zip(columns, plan.solution.offsets.tolist(), strict=True):
            if not room:
                self._expected.setdefault(named(phase, layer), []).append((size, offset))
        for place in {(group.malloc_phase, group.malloc_layer) for group in plan.dynamic}:
            groups = [group for group in plan.dynamic if (group.malloc_phase, group.malloc_layer) == place]
            turns = sorted((malloc, number) for number, group in enumerate(groups) for malloc in group.mallocs)
            by_turn = [(groups[number].spaces, groups[number].ceiling) for _, number in turns]
            common = list(zip(*_borders([group.spaces for group in groups]), strict=True))
            further = common, min(group.ceiling for group in groups)
            self._groups[named(*place)] = [*by_turn, further]

    def planned(self, place: _Place, size: int) -> int | None:
        """Return the offset of the next expected request of this size; None: none is expected."""
        expected, start = self._expected.get(place, []), self._next.get(place, 0)
        ahead, behind = range(start, min(len(expected), start + 32)), range(start - 1, max(-1, start - 33), -1)
        for at in (*ahead, *behind):
            if expected[at][0] == size and (place, at) not in self._served:
                self._served.add((place, at))
                self._next[place] = at + 1
                return expected[at][1]
        return None

    def dynamic(self, place: _Place, size: int, used: list[tuple[int, int]]) -> int | None:
        """Return the offset of the next dynamic request; None: it finds no bytes."""
        groups = self._groups.get(place)
        if groups is None:
            return None
        turn = self._turns.get(place, 0)
        self._turns[place] = min(turn + 1, len(groups) - 1)
        return _found(used, size, *groups[turn])


def _borders(of_groups: Sequence[Sequence[tuple[int, int]]]) -> tuple[list[int], list[int]]:
    """Return the stretches that are in the spaces of all groups."""
    edges = sorted({edge for spaces in of_groups for space in spaces for edge in space})
    inside = [
        (low, high)
        for low, high in zip(edges[:-1], edges[1:], strict=True)
        if all(any(begin <= low and high <= end for begin, end in spaces) for spaces in of_groups)
    ]
    joined: list[list[int]] = []
    for low, high in inside:
        if joined and joined[-1][1] == low:
            joined[-1][1] = high
        else:
            joined.append([low, high])
    return [low for low, _ in joined], [high for _, high in joined]


def _found(used: list[tuple[int, int]], size: int, spaces: Sequence[tuple[int, int]], ceiling: int) -> int | None:
    """Return the highest bytes below the ceiling, or the lowest ones, that no block uses."""
    lowest, highest = None, None
    for begin, end in spaces:
        low = begin
        for first, last in [*(each for each in used if each[0] < end and begin < each[1]), (end, end)]:
            if first - low >= size and lowest is None:
                lowest = low
            if min(first, ceiling) - low >= size:
                highest = min(first, ceiling) - size
            low = max(low, last)
    return lowest if highest is None else highest
