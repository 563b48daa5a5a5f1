"""Steps of small mixtures of experts whose sizes a drawn routing decides, and a model of the arena that serves them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from memplug.arena.plan.part import AddressPlan
from memplug.profile.trace import EventKind, Pass, Trace
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
    """What a step took.

    Attributes:
        live_bytes: the most bytes in use at once.
        beside_bytes: the most bytes in use at once that torch's allocator served.
        missed_bytes: bytes of the dynamic requests that torch's allocator served.
        dynamic_bytes: bytes of all dynamic requests.
        occupied: planned requests whose bytes were in use.
    """

    live_bytes: int = 0
    beside_bytes: int = 0
    missed_bytes: int = 0
    dynamic_bytes: int = 0
    occupied: int = 0


def serve(plan: AddressPlan, step: Trace) -> Served:
    """Serve a step as the arena does, request by request, and check that no two blocks ever share bytes."""
    rows, found = step.requests, Served()
    is_planned = ~plan.problem.buffers["room"]
    offsets = iter(plan.solution.offsets[is_planned].tolist())
    groups = _groups_by_turn(plan)
    turns: dict[tuple[int, int], int] = {}
    blocks: dict[int, tuple[int, int]] = {}
    beside: dict[int, int] = {}
    for kind, request in step.events[["kind", "request"]].tolist():
        row = rows[request]
        size = int(rounded_up(row["nbytes"], BLOCK_BYTES))
        if kind == EventKind.FREE:
            blocks.pop(request, None)
            beside.pop(request, None)
            continue
        used = sorted(blocks.values())
        if row["dynamic"]:
            place = int(row["malloc_phase"]), int(row["malloc_layer"])
            turn = turns[place] = turns.get(place, -1) + 1
            known = groups.get(place, [])
            begin = _found(used, size, *known[min(turn, len(known) - 1)]) if known else None
            found.dynamic_bytes += size
            found.missed_bytes += size * (begin is None)
        else:
            begin = next(offsets)
            if any(low < begin + size and begin < high for low, high in used):
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


def _groups_by_turn(plan: AddressPlan) -> dict[tuple[int, int], list[tuple[Sequence[tuple[int, int]], int]]]:
    """Return the spaces and the ceiling of each dynamic request in turn, by place; the last entry serves all others."""
    found: dict[tuple[int, int], dict[int, tuple[Sequence[tuple[int, int]], int]]] = {}
    for group in plan.dynamic:
        of_place = found.setdefault((group.malloc_phase, group.malloc_layer), {})
        of_place |= dict.fromkeys(group.members, (group.spaces, group.ceiling))
    turns = {}
    for place, of_place in found.items():
        common = [
            (low, high)
            for low, high in zip(*_borders([spaces for spaces, _ in of_place.values()]), strict=True)
            if low < high
        ]
        ceiling = min(ceiling for _, ceiling in of_place.values())
        turns[place] = [of_place[turn] for turn in range(max(of_place) + 1)] + [(common, ceiling)]
    return turns


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
