"""Single rows of a trace, as objects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memplug.profile.trace import REQUEST, Layer, Phase, Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class OpEvent:
    """One operator of a trace.

    Attributes:
        index: the operator's index in `Trace.operators`.
        name: the operator's name.
        phase: the phase that the operator ran in.
        layer: the operator's layer; None outside of layers.
        time_ns: see `OPERATOR`.
        in_use_bytes: see `OPERATOR`.
        depth: see `OPERATOR`.
        reads: storages of the operator's arguments, in order, as indices into `Trace.tensors`.
        writes: storages of the operator's results, in order, as indices into `Trace.tensors`.
    """

    index: int
    name: str
    phase: Phase
    layer: Layer | None
    time_ns: int
    in_use_bytes: int
    depth: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request for memory: its malloc and, if recorded, its free.

    Attributes:
        number: running number of the malloc.
        nbytes: bytes as requested, unrounded.
        stream: running number of the stream of the malloc.
        malloc_event: index into `Trace.events`.
        free_event: index into `Trace.events`; -1 without a free.
        malloc_operator: see `REQUEST_EVENT`.
        free_operator: see `REQUEST_EVENT`; -1 without a free.
        free_phase: None without a free.
        malloc_layer: None outside of layers.
        free_layer: None outside of layers, and without a free.
        free_thread: -1 without a free.
        dynamic: whether the malloc is in a dynamic layer.
    """

    number: int
    nbytes: int
    stream: int
    malloc_event: int
    free_event: int
    malloc_operator: int
    free_operator: int
    malloc_phase: Phase
    free_phase: Phase | None
    malloc_layer: Layer | None
    free_layer: Layer | None
    malloc_thread: int
    free_thread: int
    dynamic: bool

    @property
    def still_live(self) -> bool:
        """Return whether the memory was not freed before the recording ended."""
        return self.free_event < 0

    @property
    def freed_elsewhere(self) -> bool:
        """Return whether one thread requested the memory and another thread freed it."""
        return not self.still_live and self.free_thread != self.malloc_thread


def operator(trace: Trace, index: int) -> OpEvent:
    """Return one row of `trace.operators`; raise IndexError if there is no such row."""
    name, phase, layer, time_ns, in_use_bytes, depth = trace.operators[index].item()
    index = range(len(trace.operators))[index]
    uses = trace.uses[trace.uses["operator"] == index]
    return OpEvent(
        index=index,
        name=trace.names[name],
        phase=trace.phases[phase],
        layer=_layer(trace, layer),
        time_ns=time_ns,
        in_use_bytes=in_use_bytes,
        depth=depth,
        reads=tuple(uses["tensor"][~uses["output"]].tolist()),
        writes=tuple(uses["tensor"][uses["output"]].tolist()),
    )


def request(trace: Trace, number: int) -> Request:
    """Return one row of `trace.requests`; raise IndexError if there is no such row."""
    values = dict(zip(REQUEST.names, trace.requests[number].item(), strict=True))
    values["malloc_phase"] = trace.phases[values["malloc_phase"]]
    values["free_phase"] = trace.phases[values["free_phase"]] if values["free_event"] >= 0 else None
    values["malloc_layer"] = _layer(trace, values["malloc_layer"])
    values["free_layer"] = _layer(trace, values["free_layer"])
    return Request(**values)


def operators(trace: Trace) -> Iterator[OpEvent]:
    """Return every row of `trace.operators`."""
    return (operator(trace, index) for index in range(len(trace.operators)))


def requests(trace: Trace) -> Iterator[Request]:
    """Return every row of `trace.requests`."""
    return (request(trace, number) for number in range(len(trace.requests)))


def _layer(trace: Trace, index: int) -> Layer | None:
    return trace.layers[index] if index >= 0 else None
