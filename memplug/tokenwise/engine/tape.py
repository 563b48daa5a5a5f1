"""The tape of one forward of a region: its operators, and the storages that they and backward read.

The native core notes tapes (native/tape/forward.h); forwards that run the same operators share one. This file reads
tapes in Python, for the planner and for decisions, which name captured operators. A tape names storages by numbers.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import torch

from memplug.tokenwise.engine import operators


class Form(enum.Enum):
    """The way in which an operator touches memory; in the order of `Form` in native/tape/tape.h."""

    VIEW = "view"  # its outputs share the storage of an input
    WRITE = "write"  # it writes to an argument
    PURE = "pure"  # it makes new storages from its inputs, and does nothing else
    FIXED = "fixed"  # it is random, other ranks take part, or it has other effects
    EXCHANGE = "exchange"  # other ranks take part, and its outputs are arguments that it writes to
    VALUE = "value"  # Python gets a number from it


_FORMS = list(Form)

REASONS = {
    1 << 0: "a tensor subclass that dispatches for itself",
    1 << 1: "memory that is read or written past torch's operators",
    1 << 2: "memory that no operator was seen to fill",
    1 << 3: "an operator that raised",
    1 << 4: "a tensor that was given other memory in place",
    1 << 5: "a function transform or forward-mode differentiation inside of it",
    1 << 6: "an operator that made a sparse, nested or quantized tensor",
    1 << 7: "another region that runs inside of it",
    1 << 8: "a gradient that it asks for itself, computed on another thread",
    1 << 9: "a dispatch mode around it that changes what operators do",
}
"""Reasons why a region is opaque, by the bits of `Opaque` in native/tape/tape.h."""


def named(reasons: int) -> str:
    """Return the reasons of these bits, in words."""
    return ", ".join(text for bit, text in REASONS.items() if reasons & bit)


class Record(NamedTuple):
    """One operator of a tape; storages are given by their numbers.

    Attributes:
        func: the operator.
        form: how it touches memory.
        root: whether a recompute pass runs it even if nothing reads its outputs.
        draws: whether it advances a random generator.
        rows: number of rows of the first tensor that it returned.
        inputs: storages that it read.
        outputs: storages that it made.
        written: storages that it wrote to.
        results: storages of all tensors that it returned.
        dimensions: number of dimensions of each tensor among its arguments.
    """

    func: Any
    form: Form
    root: bool
    draws: bool
    rows: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    written: tuple[int, ...]
    results: tuple[int, ...]
    dimensions: tuple[int, ...]


def records_of(tape: Any) -> list[Record]:
    """Return all records of a native tape; the first call for the tape makes them."""
    if not hasattr(tape, "records"):
        tape.records = []
        for index in range(len(tape)):
            name, overload, form, root, draws, rows, *storages = tape.record(index)
            func = operators.named(name, overload)
            tape.records.append(Record(func, _FORMS[form], root, draws, rows, *map(tuple, storages)))
    return tape.records


class Tape:
    """The tape of one particular forward, for the planner: records of operators, and device times around each.

    Attributes:
        native: the native tape.
        asked: storages that backward asks for, however they are restored.
        given: storages that no operator made.
        bytes: size of every storage.
        spared: indices of the collectives that no recompute pass launches again, and of the waits for them.
        received: storages that the spared collectives filled; a recompute pass substitutes them.
        stamps: (begin, end) of every operator, if times were taken.
        span: (begin, end) of the forward; None without times, as in the two attributes below.
        recompute_span: (begin, end) of the recompute pass.
        backward_begin: time at which backward first asked for a saved tensor.
    """

    def __init__(self, frame: Any):
        self.native = tape = frame.tape
        self.records = records_of(tape)
        self.asked: set[int] = {frame.storage_of(saved) for saved in range(frame.saved)} - {-1}
        self.given = {storage for storage, given in enumerate(tape.given) if given}
        self.bytes: list[int] = tape.nbytes
        self.spared: set[int] = frame.spared
        self.received: set[int] = frame.received
        self.stamps: list[tuple[Any, Any]] = []
        self.span: Any = None
        self.recompute_span: Any = None
        self.backward_begin: Any = None


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's storage object: it names the storage only while the tensor lives."""
    return tensor.untyped_storage()._cdata
