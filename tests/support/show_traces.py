"""Traces for the tests of `memplug.show`: a made-up training run, and one with oddities."""

from __future__ import annotations

from memplug.profile.trace import Fingerprint, Pass, Trace
from tests.support.traces import Recording

MIB = 2**20


def training_trace(
    *, layers: int = 4, micro_batches: int = 2, steps: int = 1, unit_bytes: int = 8 * MIB, base_bytes: int = 96 * MIB
) -> Trace:
    """Return a training run whose peak is in the backward of the last layer, in any micro-batch but the first.

    All gradients exist by then. A layer saves 6 units in 5 operators. Its gradients are 2 units; the first micro-batch
    makes them, and they stay until the optimizer. The last layer is dynamic.
    """
    recording = Recording()
    for _ in range(steps):
        recording.step(0.5)
        recording.phase(Pass.OTHER)
        recording.op("aten::to")
        gradients: list[int] = []
        for micro_batch in range(micro_batches):
            recording.phase(Pass.FORWARD, micro_batch)
            saved = []
            for i in range(layers):
                _enter(recording, i, layers)
                saved.append(_forward(recording, unit_bytes))
            recording.phase(Pass.BACKWARD, micro_batch)
            for i in reversed(range(layers)):
                _enter(recording, i, layers)
                gradients += _backward(recording, saved[i], unit_bytes, first=micro_batch == 0)
            recording.layer(None)
        recording.phase(Pass.OPTIMIZER)
        for gradient in gradients:
            recording.op("aten::_foreach_add_")
            recording.free(recording.malloc(unit_bytes // 2))
            recording.free(gradient)
    what = Fingerprint(
        model="Stack",
        parameters=1_234_567,
        inputs=("int64[1, 512]",) * micro_batches,
        device="NVIDIA H200",
        rank=3,
        world_size=8,
        versions=(("torch", "2.13.0"),),
    )
    counted = recording.trace(base_bytes=base_bytes).replayed_peak()[1]
    return recording.trace(fingerprint=what, base_bytes=base_bytes, peak_bytes=counted)


def _enter(recording: Recording, layer: int, layers: int) -> None:
    recording.layer(f"model.layers.{layer}", dynamic=layer == layers - 1)


def _forward(recording: Recording, unit_bytes: int) -> list[int]:
    saved = []
    for name, halves in (("rms_norm", 2), ("mm", 3), ("silu", 3), ("mul", 3), ("add", 1)):
        recording.op(f"aten::{name}")
        temporary = recording.malloc(unit_bytes // 4)
        saved.append(recording.malloc(halves * unit_bytes // 2))
        recording.free(temporary)
    return saved


def _backward(recording: Recording, saved: list[int], unit_bytes: int, *, first: bool) -> list[int]:
    gradients = []
    for request in reversed(saved):
        recording.op("aten::mm")
        passed_on = recording.malloc(unit_bytes)
        recording.free(request)
        if first and len(gradients) < 2:
            gradients.append(recording.malloc(unit_bytes))
        recording.free(passed_on)
    return gradients


def odd_trace() -> Trace:
    """Return a trace with names special to HTML and TeX, two streams, threads, empty requests, frees of old blocks."""
    recording = Recording()
    recording.layer(r"_orig_mod.$\frac{$</script><b>&", dynamic=True)
    recording.op("aten::<mm>$_$")
    first = recording.malloc(MIB - 1000)
    recording.free(-1, 2 * MIB)
    recording.free(-1)
    recording.layer("")
    recording.phase(Pass.OPTIMIZER)
    recording.op("µ\n")
    recording.malloc(0, stream=3, thread=1)
    recording.malloc(MIB, stream=3)
    recording.free(first, thread=2)
    return recording.trace(base_bytes=5 * MIB, fingerprint=Fingerprint(model="<Model>$"))
