"""Defines the rows of a trace, as numpy dtypes and dataclasses: operators, storages, uses, requests for memory."""

from __future__ import annotations

import enum
import hashlib
import json
import re
from dataclasses import asdict, dataclass, replace

import numpy as np


class Pass(enum.IntEnum):
    """Part of a training step."""

    OTHER = 0  # between the other passes: data loading, logging
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3
    EITHER = 4  # forward or backward: files of format 0 do not say which
    NO_GRAD = 5  # forward without backward: validation, or a reference model
    PREFETCH = 6  # memory of offloaded tensors that come back during a backward


class EventKind(enum.IntEnum):
    """Kind of an event: a request's malloc or its free."""

    MALLOC = 0
    FREE = 1


OPERATOR = np.dtype(
    [
        ("name", "<i4"),  # index into Trace.names
        ("phase", "<i4"),  # index into Trace.phases
        ("layer", "<i4"),  # index into Trace.layers, -1 outside layers
        ("time_ns", "<i8"),  # when the host dispatched the operator; 0: the recording began
        ("in_use_bytes", "<i8"),  # device memory in use when the operator began
        ("depth", "<i2"),  # number of operators that it runs inside of; -1: not part of the program; -2: memplug's own
    ]
)
USE = np.dtype([("operator", "<i4"), ("tensor", "<i4"), ("output", "?")])  # sorted by operator, in program order
TENSOR = np.dtype([("nbytes", "<i8"), ("dtype", "<i4")])  # a storage; dtype is an index into Trace.dtypes
REQUEST_EVENT = np.dtype(
    [
        ("kind", "<i4"),  # EventKind
        ("request", "<i8"),  # running number of the malloc, from 0; -1: allocated before the recording
        ("nbytes", "<i8"),  # of a malloc: requested, unrounded; of a free: 0, or for request -1 the size if known
        ("stream", "<i8"),  # running number of the stream, the same in all traces of a recorder; 0 on the CPU
        ("operator", "<i8"),  # the running operator, or the last one that ran; -1: none yet
        ("phase", "<i4"),
        ("layer", "<i4"),
        ("thread", "<i4"),  # 0: the training thread or one of autograd's; other threads are numbered from 1
    ]
)
REQUEST = np.dtype(  # a malloc and its free; if the recording ended before the free, the free_ columns are -1
    [
        ("number", "<i8"),  # index of the row
        ("nbytes", "<i8"),
        ("stream", "<i8"),  # stream of the malloc
        ("malloc_event", "<i8"),  # index into Trace.events
        ("free_event", "<i8"),
        ("malloc_operator", "<i8"),
        ("free_operator", "<i8"),
        ("malloc_phase", "<i4"),
        ("free_phase", "<i4"),
        ("malloc_layer", "<i4"),
        ("free_layer", "<i4"),
        ("malloc_thread", "<i4"),
        ("free_thread", "<i4"),
        ("dynamic", "?"),  # its size depends on data, or whether it comes
    ]
)


@dataclass(frozen=True, slots=True)
class Phase:
    """One forward or backward of one micro-batch, the optimizer, or an interval between them.

    Attributes:
        kind: the phase's pass.
        micro_batch: number of the micro-batch in the step, from 0, in the order of the forwards; -1 without one.
    """

    kind: Pass
    micro_batch: int = -1


@dataclass(frozen=True, slots=True)
class Layer:
    """A module to which the recorder attributes memory.

    Attributes:
        name: qualified name of the module.
        dynamic: True if the module's requests may depend on the data (experts of a mixture). Whether they do, two
            recorded steps show (`memplug.profile.varying`).
    """

    name: str
    dynamic: bool = False


_SHAPES, _NUMBERS = re.compile(r"\[(.*?)\]"), re.compile(r"\d+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """The job and the inputs of a recording.

    Two traces with equal fingerprints come from the same program on the same kind of machine.

    Attributes:
        model: class of the model.
        parameters: number of elements of all parameters.
        layers: digest of the names and classes of the model's layers.
        inputs: shapes and dtypes of the inputs of each forward, for example "int64[4, 512]".
        rank: rank of the process.
        world_size: number of ranks in the job.
        device: name of the device.
        versions: packages and versions, sorted.
        layout: the job's split over its ranks, as sorted names and numbers such as ("zero_stage", 2).
        block: digest of the "memplug" block.
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
    def input_sizes(self) -> tuple[tuple[int, ...], ...]:
        """Return the sizes of all dimensions of each forward's inputs, in order; for example ((4, 512),)."""
        return tuple(tuple(map(int, _NUMBERS.findall(" ".join(_SHAPES.findall(text))))) for text in self.inputs)

    @property
    def job(self) -> Fingerprint:
        """Return the fingerprint without inputs and rank: the same for all ranks that run the same layers."""
        return replace(self, inputs=(), rank=0)

    def changes(self, later: Fingerprint) -> list[str]:
        """Return texts on how a later job differs from this one; ranks and inputs are not compared."""
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
        """Return a digest of the fingerprint, twelve hexadecimal digits; equal in all processes."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


def _shown(value: object) -> str:
    pairs = isinstance(value, tuple)
    return ", ".join(f"{name} {which}" for name, which in value) or "none" if pairs else str(value)
