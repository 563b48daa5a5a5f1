"""Small traces: traces written row by row, traces of a training loop over two layers, and random traces."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

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
)
from tests.support.folders import DATA

LEGACY = (DATA / "llama7b_long_ckpt.npz", DATA / "mixtral_ckpt.npz")
"""Traces recorded on one H200, with columns kind, request, bytes, phase, layer, stream."""


class Recording:
    """Records calls in their order, and returns them as a trace."""

    def __init__(self) -> None:
        self.names, self.dtypes, self.phases, self.layers = [], [], [], []
        self.operators, self.uses, self.tensors, self.events, self.steps = [], [], [], [], []
        self.requests = 0
        self.phase(Pass.OTHER)
        self.layer(None)

    def phase(self, kind: Pass, micro_batch: int = -1) -> None:
        self.in_phase = _index(self.phases, Phase(kind, micro_batch))

    def layer(self, name: str | None, dynamic: bool = False) -> None:
        self.in_layer = -1 if name is None else _index(self.layers, Layer(name, dynamic))

    def step(self, seconds: float = 1.0) -> None:
        self.steps.append((len(self.operators), len(self.events), seconds))

    def tensor(self, nbytes: int = 4, dtype: str = "float32") -> int:
        self.tensors.append((nbytes, _index(self.dtypes, dtype)))
        return len(self.tensors) - 1

    def op(self, name: str, reads: tuple[int, ...] = (), writes: tuple[int, ...] = ()) -> int:
        number = len(self.operators)
        self.operators.append((_index(self.names, name), self.in_phase, self.in_layer, 1000 * number, 0, 0))
        self.uses += [(number, tensor, False) for tensor in reads] + [(number, tensor, True) for tensor in writes]
        return number

    def malloc(self, nbytes: int, *, stream: int = 0, thread: int = 0) -> int:
        self._event(EventKind.MALLOC, self.requests, nbytes, stream, thread)
        self.requests += 1
        return self.requests - 1

    def free(self, request: int, nbytes: int = 0, *, stream: int = 0, thread: int = 0) -> None:
        self._event(EventKind.FREE, request, nbytes, stream, thread)

    def fields(self) -> dict:
        """Return the arguments of `Trace`; its arrays may be written to."""
        return {
            "fingerprint": Fingerprint(model="Sample", inputs=("int64[1, 8]",), versions=(("torch", "2.11.0"),)),
            "names": tuple(self.names),
            "dtypes": tuple(self.dtypes),
            "phases": tuple(self.phases),
            "layers": tuple(self.layers),
            "operators": np.array(self.operators, OPERATOR),
            "uses": np.array(self.uses, USE),
            "tensors": np.array(self.tensors, TENSOR),
            "events": np.array(self.events, REQUEST_EVENT),
            "steps": tuple(self.steps),
        }

    def trace(self, **changes: object) -> Trace:
        return Trace(**{**self.fields(), **changes})

    def _event(self, kind: EventKind, request: int, nbytes: int, stream: int, thread: int) -> None:
        place = (len(self.operators) - 1, self.in_phase, self.in_layer)
        self.events.append((kind, request, nbytes, stream, *place, thread))


def training(steps: int = 2, micro_batches: int = 2) -> Recording:
    """Return a training loop over two layers, the second one dynamic.

    Each layer's forward writes an activation, which its backward reads and frees. The weights (100 bytes a layer) exist
    before the recording. Activations have 16 bytes in the first layer, 32 in the second.
    """
    recording = Recording()
    weights = [recording.tensor(100, "bfloat16") for _ in range(2)]
    for _ in range(steps):
        recording.step(0.5)
        for micro_batch in range(micro_batches):
            recording.phase(Pass.FORWARD, micro_batch)
            saved = [_forward(recording, layer, weights[layer]) for layer in range(2)]
            recording.phase(Pass.BACKWARD, micro_batch)
            for layer in (1, 0):
                _backward(recording, layer, weights[layer], *saved[layer])
        recording.phase(Pass.OPTIMIZER)
        recording.layer(None)
        for weight in weights:
            recording.op("aten::add_", reads=(weight,), writes=(weight,))
    return recording


def _forward(recording: Recording, layer: int, weight: int) -> tuple[int, int]:
    recording.layer(f"layers.{layer}", dynamic=layer == 1)
    nbytes = 16 * (layer + 1)
    activation, request = recording.tensor(nbytes), recording.malloc(nbytes)
    recording.op("aten::mm", reads=(weight,), writes=(activation,))
    recording.op("aten::silu_", reads=(activation,), writes=(activation,))
    return activation, request


def _backward(recording: Recording, layer: int, weight: int, activation: int, request: int) -> None:
    recording.layer(f"layers.{layer}", dynamic=layer == 1)
    gradient, scratch = recording.tensor(8), recording.malloc(8)
    recording.op("aten::mm", reads=(weight, activation), writes=(gradient,))
    recording.free(request)
    recording.op("aten::mul", reads=(gradient,), writes=(gradient,))
    recording.free(scratch)


@st.composite
def recordings(draw: st.DrawFn, most: int = 60) -> Recording:
    """Draw a recording of operators and requests in any order; any thread frees a request, or none does."""
    recording = Recording()
    for _ in range(draw(st.integers(0, 3))):
        recording.tensor(draw(st.integers(0, 2**40)), draw(st.sampled_from(("float32", "bfloat16", "int8"))))
    live = []
    happenings = ("step", "phase", "layer", "op", "op", "malloc", "malloc", "free", "free")
    count = draw(st.integers(0, most))  # drawn first: lists of unknown length turn out short
    for happening in draw(st.lists(st.sampled_from(happenings), min_size=count, max_size=count)):
        thread = draw(st.integers(0, 2))
        if happening == "step":
            recording.step(draw(st.floats(0, 100)))
        elif happening == "phase":
            recording.phase(draw(st.sampled_from(Pass)), draw(st.integers(-1, 3)))
        elif happening == "layer":
            recording.layer(draw(st.one_of(st.none(), st.text(max_size=4))), draw(st.booleans()))
        elif happening == "op":
            several = (
                st.lists(st.integers(0, len(recording.tensors) - 1), max_size=2) if recording.tensors else st.just([])
            )
            recording.op(draw(st.sampled_from(("aten::mm", "aten::add", "ünïcode"))), draw(several), draw(several))
        elif happening == "malloc":
            live.append(recording.malloc(draw(st.integers(0, 2**40)), stream=draw(st.integers(0, 2)), thread=thread))
        elif live and draw(st.booleans()):
            recording.free(live.pop(draw(st.integers(0, len(live) - 1))), thread=thread)
        else:
            recording.free(-1, draw(st.integers(0, 2**40)), thread=thread)
    return recording


def assert_same(one: Trace, other: Trace) -> None:
    """Assert that all fields are equal, with dtypes and all rows of arrays."""
    for name in Trace.__dataclass_fields__:
        mine, its = getattr(one, name), getattr(other, name)
        if isinstance(mine, np.ndarray):
            assert mine.dtype == its.dtype and np.array_equal(mine, its), name
        else:
            assert mine == its, name


def _index(table: list, entry: object) -> int:
    if entry not in table:
        table.append(entry)
    return table.index(entry)
