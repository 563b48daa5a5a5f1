"""Synthetic training steps: recorded layers, run by another schedule.

`scripts` takes the requests and frees of one decoder layer from a recorded step, as three scripts: a forward that keeps
nothing, a forward that saves for backward, and a backward. A script may free memory that another script requested.
`record` runs these scripts for one rank's layers in the order of Megatron's interleaved 1F1B schedule, with or without
recomputation, and adds temporaries of the optimizer. Sizes are as recorded; in dynamic layers each micro-batch scales
them by a random factor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np

from memplug.profile.trace import (
    OPERATOR,
    REQUEST_EVENT,
    TENSOR,
    USE,
    EventKind,
    Fingerprint,
    Layer,
    Pass,
    Phase,
    Trace,
    cut,
)
from memplug.profile.trace_file import load
from tests.support.folders import DATA

EXPERT_BYTES = 120 * 2**20
"""A request of a recorded Mixtral layer counts as a request of its experts if it has at least so many bytes."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The actions of one rank in a step.

    Attributes:
        source: name of a recorded trace in tests/data; its step recomputes.
        layers: layers of this rank; a multiple of `chunks`.
        micro_batches: micro-batches of a step; a multiple of `stages`.
        stages: stages of the pipeline.
        stage: this rank's stage; the first stage has the most micro-batches in flight.
        chunks: chunks of the virtual pipeline.
        recompute: run forwards that keep only their input, and run them again before their backward.
        dynamic: the experts' requests have different sizes in each micro-batch.
        requests: requests of the whole step; temporaries of the optimizer make up the difference.
    """

    source: str
    layers: int
    micro_batches: int
    stages: int = 4
    stage: int = 0
    chunks: int = 1
    recompute: bool = False
    dynamic: bool = False
    requests: int = 0


# The counts of requests are from STWeaver's Table 2, for models of these kinds; the schedules are ours.
SCHEDULES = {
    "gpt2-n": Schedule(source="llama7b_ckpt", layers=3, micro_batches=36, requests=12_785),
    "gpt2-r": Schedule(source="llama7b_ckpt", layers=3, micro_batches=36, recompute=True, requests=16_569),
    "llama2-7b-n": Schedule(source="llama7b_ckpt", layers=10, micro_batches=60, chunks=2, requests=66_529),
    "llama2-7b-r": Schedule(
        source="llama7b_ckpt", layers=10, micro_batches=56, chunks=2, recompute=True, requests=86_721
    ),
    "qwen-moe-n": Schedule(
        source="mixtral_ckpt", layers=6, micro_batches=176, chunks=2, dynamic=True, requests=196_759
    ),
    "qwen-moe-r": Schedule(
        source="mixtral_ckpt", layers=6, micro_batches=180, chunks=2, recompute=True, dynamic=True, requests=281_669
    ),
}


class Action(NamedTuple):
    """One row of a script: a malloc of `nbytes`, or the free of a malloc, which may be in another layer's script.

    Attributes:
        script: the malloc's script: "forward", "saving" or "backward".
        layer: the malloc's layer, relative to this one.
        slot: running number of the malloc in that script.
        nbytes: 0 for a free.
    """

    script: str
    layer: int
    slot: int
    nbytes: int


@cache
def scripts(source: str) -> dict[str, tuple[Action, ...]]:
    """Return what a middle layer of a recorded model does, in forward, in recomputation ("saving") and in backward."""
    step = cut(load(DATA / f"{source}.npz"), 1)
    events = step.events
    borders = np.flatnonzero(np.diff(events["layer"], prepend=-2) | np.diff(events["phase"], prepend=-2))
    starts = {(int(events["phase"][at]), int(events["layer"][at])): int(at) for at in borders[::-1]}
    last = len(step.layers) - 1
    spans: dict[tuple[str, int], tuple[int, int]] = {}
    for layer in range(1, last):
        spans["forward", layer] = (starts[0, layer], starts[0, layer + 1])
        turn = _turn(events, spans["forward", layer], (starts[1, layer], starts[1, layer - 1]))
        spans["saving", layer] = (starts[1, layer], turn)
        spans["backward", layer] = (turn, starts[1, layer - 1])
    owner = {
        request: (script, layer, slot)
        for (script, layer), span in spans.items()
        for slot, request in enumerate(_mallocs(events, *span))
    }
    middle = last // 2
    return {
        script: tuple(_actions(events, *spans[script, middle], middle, owner))
        for script in ("forward", "saving", "backward")
    }


def _turn(events: np.ndarray, forward: tuple[int, int], again: tuple[int, int]) -> int:
    """Return the event at which a layer's recompute ends and its backward begins.

    The recompute lasts as long as its requests equal those of the forward.
    """
    mallocs = np.flatnonzero(events["kind"] == EventKind.MALLOC)
    first, second = (mallocs[(mallocs >= begin) & (mallocs < end)] for begin, end in (forward, again))
    count = min(len(first), len(second))
    differs = events["nbytes"][first[:count]] != events["nbytes"][second[:count]]
    return int(second[int(differs.argmax()) - 1]) + 1


def _mallocs(events: np.ndarray, begin: int, end: int) -> list[int]:
    rows = events[begin:end]
    return rows["request"][rows["kind"] == EventKind.MALLOC].tolist()


def _actions(
    events: np.ndarray, begin: int, end: int, layer: int, owner: dict[int, tuple[str, int, int]]
) -> Iterator[Action]:
    for row in events[begin:end]:
        script, of_layer, slot = owner.get(int(row["request"]), ("", 0, 0))
        if script:
            yield Action(script, of_layer - layer, slot, int(row["nbytes"]))


@dataclass
class _Recorder:
    """Records a step; ignores frees of requests that do not exist, as at the model's first and last layer."""

    schedule: Schedule
    random: np.random.Generator
    rows: list[tuple[int, int, int, int, int]] = field(default_factory=list)  # kind, request, nbytes, phase, layer
    live: dict[tuple[str, int, int, int], int] = field(default_factory=dict)  # script, micro-batch, layer, slot
    phases: dict[Phase, int] = field(default_factory=dict)
    phase: int = 0
    requests: int = 0

    def enter(self, kind: Pass, micro_batch: int = -1) -> None:
        self.phase = self.phases.setdefault(Phase(kind, micro_batch), len(self.phases))

    def malloc(self, nbytes: int, layer: int) -> int:
        self.rows.append((EventKind.MALLOC, self.requests, nbytes, self.phase, layer))
        self.requests += 1
        return self.requests - 1

    def free(self, request: int, layer: int) -> None:
        self.rows.append((EventKind.FREE, request, 0, self.phase, layer))

    def run(self, script: str, micro_batch: int, layer: int) -> None:
        factor = self.random.uniform(0.6, 1.4)
        for action in scripts(self.schedule.source)[script]:
            key = (action.script, micro_batch, layer + action.layer, action.slot)
            of_experts = self.schedule.dynamic and action.nbytes >= EXPERT_BYTES
            place = self.schedule.layers + layer if of_experts else layer
            if action.nbytes:
                self.live[key] = self.malloc(int(action.nbytes * (factor if of_experts else 1)), place)
            elif key in self.live:
                self.free(self.live.pop(key), place)

    def forward(self, micro_batch: int, layer: int) -> None:
        if self.schedule.recompute:
            self.run("forward", micro_batch, layer)
            return
        self.run("saving", micro_batch, layer)
        # "saving" was recorded in a recompute, which ends before it requests the layer's output; so request the output
        # here. The next layer saves it.
        output = next(act for act in scripts(self.schedule.source)["backward"] if act.script == "forward")
        nbytes = [act.nbytes for act in scripts(self.schedule.source)["forward"] if act.nbytes][output.slot]
        self.live["forward", micro_batch, layer, output.slot] = self.malloc(nbytes, layer)

    def let_go(self, micro_batch: int, layers: range, scripts_of: tuple[str, ...]) -> None:
        """Free the remaining requests of a micro-batch after its last layer."""
        for key in [key for key in self.live if key[1] == micro_batch and key[2] in layers and key[0] in scripts_of]:
            self.free(self.live.pop(key), -1)


def record(schedule: Schedule, seed: int = 0) -> Trace:
    """Return one step of that schedule, as a recording of its requests."""
    recorder = _Recorder(schedule, np.random.default_rng(seed))
    for kind, micro_batch, chunk in order(schedule):
        recorder.enter(kind, micro_batch)
        per_chunk = schedule.layers // schedule.chunks
        layers = range(chunk * per_chunk, (chunk + 1) * per_chunk)
        if kind == Pass.FORWARD:
            for layer in layers:
                recorder.forward(micro_batch, layer)
            continue
        for layer in reversed(layers):
            if schedule.recompute:
                recorder.run("saving", micro_batch, layer)
            recorder.run("backward", micro_batch, layer)
        recorder.let_go(micro_batch, layers, ("forward", "saving", "backward"))
    recorder.enter(Pass.OPTIMIZER)
    sizes = 2**20 * np.array([32, 86, 250, 1])
    while recorder.requests < schedule.requests:
        recorder.free(recorder.malloc(int(sizes[recorder.requests % len(sizes)]), -1), -1)
    return _trace(recorder)


def order(schedule: Schedule) -> Iterator[tuple[Pass, int, int]]:
    """Yield (forward or backward, micro-batch, chunk) as Megatron's interleaved 1F1B runs them on one stage."""
    stages, chunks, total = schedule.stages, schedule.chunks, schedule.micro_batches * schedule.chunks
    ahead = (stages - schedule.stage - 1) * (2 if chunks > 1 else 1) + (chunks - 1) * stages
    warm_up = min(total, ahead)

    def place(turn: int) -> tuple[int, int]:
        group, within = divmod(turn, stages * chunks)
        return group * stages + within % stages, within // stages

    for turn in range(total + warm_up):
        if turn < total:
            micro_batch, chunk = place(turn)
            yield Pass.FORWARD, micro_batch, chunk
        if turn >= warm_up:
            micro_batch, chunk = place(turn - warm_up)
            yield Pass.BACKWARD, micro_batch, chunks - 1 - chunk


def _trace(recorder: _Recorder) -> Trace:
    events = np.zeros(len(recorder.rows), REQUEST_EVENT)
    columns = np.array(recorder.rows, np.int64).reshape(-1, 5).T
    for name, column in zip(("kind", "request", "nbytes", "phase", "layer"), columns, strict=True):
        events[name] = column
    events["operator"] = -1
    layers = recorder.schedule.layers
    return Trace(
        fingerprint=Fingerprint(model=recorder.schedule.source),
        names=(),
        dtypes=(),
        phases=tuple(recorder.phases),
        layers=(
            *(Layer(f"layers.{layer}") for layer in range(layers)),
            *(Layer(f"layers.{layer}.experts", dynamic=True) for layer in range(layers)),
        ),
        operators=np.empty(0, OPERATOR),
        uses=np.empty(0, USE),
        tensors=np.empty(0, TENSOR),
        events=events,
        steps=((0, 0, 0.0),),
    )
