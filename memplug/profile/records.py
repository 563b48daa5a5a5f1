"""Rows of a trace: what an operator, a storage, a use of it and a request for memory are, as numpy and as values."""

from __future__ import annotations

import enum
import hashlib
import json
from dataclasses import asdict, dataclass, replace

import numpy as np


class Pass(enum.IntEnum):
    """What a training step is doing."""

    OTHER = 0  # between the others: data, logging
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3
    EITHER = 4  # a forward or a backward: the file does not say
    NO_GRAD = 5  # a forward that no backward follows: validation, or a reference model


class EventKind(enum.IntEnum):
    """What a request for memory asks."""

    MALLOC = 0
    FREE = 1


OPERATOR = np.dtype(
    [
        ("name", "<i4"),  # into Trace.names
        ("phase", "<i4"),  # into Trace.phases
        ("layer", "<i4"),  # into Trace.layers, -1 outside of layers
        ("time_ns", "<i8"),  # when the host dispatched it, from the beginning of the recording
        ("in_use_bytes", "<i8"),  # device memory in use as it began
        ("depth", "<i2"),  # how many operators it runs inside of; -1: it is no part of the program; -2: it is memplug's
    ]
)
USE = np.dtype([("operator", "<i4"), ("tensor", "<i4"), ("output", "?")])  # by operator, in program order
TENSOR = np.dtype([("nbytes", "<i8"), ("dtype", "<i4")])  # a storage; dtype into Trace.dtypes
REQUEST_EVENT = np.dtype(
    [
        ("kind", "<i4"),  # EventKind
        ("request", "<i8"),  # running number of the malloc, from 0; -1: allocated before the recording
        ("nbytes", "<i8"),  # as asked for, unrounded; on a free 0, or what a request of before gave back, if known
        ("stream", "<i8"),  # running number of the stream in this trace; on the CPU 0
        ("operator", "<i8"),  # that was running, or had run last; -1: none yet
        ("phase", "<i4"),
        ("layer", "<i4"),
        ("thread", "<i4"),  # 0: the one that trains, and autograd's; others by running number
    ]
)
REQUEST = np.dtype(  # a malloc and its free; still live when the recording ended: every free_ column is -1
    [
        ("number", "<i8"),  # its index
        ("nbytes", "<i8"),
        ("stream", "<i8"),  # of the malloc
        ("malloc_event", "<i8"),  # into Trace.events
        ("free_event", "<i8"),
        ("malloc_operator", "<i8"),
        ("free_operator", "<i8"),
        ("malloc_phase", "<i4"),
        ("free_phase", "<i4"),
        ("malloc_layer", "<i4"),
        ("free_layer", "<i4"),
        ("malloc_thread", "<i4"),
        ("free_thread", "<i4"),
        ("dynamic", "?"),  # asked for in a dynamic layer
    ]
)


@dataclass(frozen=True, slots=True)
class Phase:
    """One forward or backward of one micro-batch, the optimizer, or what lies between.

    Attributes:
        kind: see `Pass`.
        micro_batch: running number in the step (1F1B: in the order of their forwards), -1 where there is none.
    """

    kind: Pass
    micro_batch: int = -1


@dataclass(frozen=True, slots=True)
class Layer:
    """A module that memory is accounted to.

    Attributes:
        name: its qualified name.
        dynamic: what it asks for depends on the data (experts of a mixture).
    """

    name: str
    dynamic: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """What was recorded. Two traces of equal fingerprints come from the same program on the same kind of machine.

    Attributes:
        model: class of the model.
        parameters: elements of all parameters.
        layers: names and classes of its layers, in a digest.
        inputs: shape and dtype of the inputs of each forward, for example "int64[4, 512]".
        rank, world_size: of the process.
        device: its name.
        versions: package and version, sorted.
        layout: how the job is split over its ranks, name and number, sorted: ("zero_stage", 2).
        block: what the "memplug" block asks for, in a digest.
    """

    model: str = ""
    parameters: int = 0
    layers: str = ""
    inputs: tuple[str, ...] = ()
    rank: int = 0
    world_size: int = 1
    device: str = ""
    versions: tuple[tuple[str, str], ...] = ()
    layout: tuple[tuple[str, int], ...] = ()
    block: str = ""

    @property
    def job(self) -> Fingerprint:
        """Without what only a step shows, and the rank: the same for ranks that run the same layers."""
        return replace(self, inputs=(), rank=0)

    def changes(self, later: Fingerprint) -> list[str]:
        """How a later job differs, for people; ranks and inputs are not compared."""
        found = [
            f"{name.replace('_', ' ')} {_shown(before)}, now {_shown(now)}"
            for name, before in asdict(self.job).items()
            if (now := getattr(later.job, name)) != before and name not in ("layers", "block")
        ]
        if self.layers != later.layers:
            found.append("other layers")
        if self.block != later.block:
            found.append('another "memplug" block')
        return found

    def digest(self) -> str:
        """Twelve hexadecimal digits, the same in every process."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


def _shown(value: object) -> str:
    pairs = isinstance(value, tuple)
    return ", ".join(f"{name} {which}" for name, which in value) or "none" if pairs else str(value)
