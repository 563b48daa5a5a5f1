"""Compares native tapes with reference tapes of the same forwards, operator by operator."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

from torch import nn

from memplug.tokenwise.engine.tape import REASONS, Record, records_of
from tests.support.native_forward import Run
from tests.support.reference_tape import Recording, Tape

AUTOGRADS_OWN = {"aten::detach", "aten::clone"}
# operators that gloo runs to return a result: they take this rank's part of a sum, and copy the part to the output
BACK_ENDS_OWN = {"c10d::_reduce_scatter_base_": ["aten::chunk", "aten::copy_"]}
(UNFILLED,) = (bit for bit, reason in REASONS.items() if reason == "memory that no operator was seen to fill")


def both(core: Any, call: Callable[[], Any]) -> tuple[Run, Tape]:
    """Run one native forward, and return it with its reference tape."""
    with Recording() as reference:
        run = Run(core, call)
    for tensor in run.saved:
        reference.tape.read(tensor)
    reference.tape.close()
    return run, reference.tape


def compare(tape: Any, reference: Tape) -> None:
    """Assert that records are equal in every field, and their storages up to renumbering.

    Operators that torch itself runs inside another operator are not compared: a view of a saved tensor, a copy of
    memory before it is overwritten, a copy of a conjugated view.

    Raises:
        AssertionError: names the operator and the field that differ.
    """
    found, at = records_of(tape), 0
    called: dict[int, int] = {}
    copied: dict[int, int] = {}  # storage of a copy that torch itself made -> the original's storage
    theirs = _without_back_ends_own(reference.records)
    for record in theirs:
        name = record.func._schema.name
        if name in AUTOGRADS_OWN and (at == len(found) or found[at].func is not record.func):
            copied.update(dict(zip(record.outputs, record.inputs, strict=False)))
            continue
        assert at < len(found), f"the native tape ends before {name}"
        _compare_records(f"operator {at}, {name}", found[at], record, called, copied)
        at += 1
    assert at == len(found), f"the native tape goes on with {found[at].func}"
    assert len(set(called.values())) == len(called), "two storages of the native tape are one"
    for mine, number in called.items():
        assert tape.given[mine] == (number in reference.given), f"storage {mine} is given"
        assert tape.nbytes[mine] == reference.bytes[number], f"the bytes of storage {mine}"
    assert bool(tape.opaque & UNFILLED) == reference.has_unfilled(), "memory that is not filled"


def _compare_records(where: str, ours: Record, theirs: Record, called: dict[int, int], copied: dict[int, int]) -> None:
    for field in Record._fields:
        mine, other = getattr(ours, field), getattr(theirs, field)
        if field not in ("inputs", "outputs", "written", "results"):
            assert mine == other, f"{where}: {field} {mine}, not {other}"
            continue
        assert len(mine) == len(other), f"{where}: {field} {mine}, not as many as {other}"
        for one, number in zip(mine, other, strict=True):
            number = number if field == "outputs" else copied.get(number, number)
            assert called.setdefault(one, number) == number, f"{where}: storage {one} among {field} {mine}"


def _without_back_ends_own(records: list[Record]) -> Iterable[Record]:
    expected: list[str] = []
    for index, record in enumerate(records):
        name = record.func._schema.name
        if expected and name == expected[0]:
            expected = expected[1:]
            continue
        own = BACK_ENDS_OWN.get(name, [])
        following = records[index + 1 : index + 1 + len(own)]
        expected = own if own == [each.func._schema.name for each in following] else []
        yield record


def compare_layers(core: Any, layers: Iterable[nn.Module], call: Callable[[], Any]) -> list[Any]:
    """Run a call, compare each native tape of the layers' forwards with its reference, and return the native tapes.

    Then each forward runs twice more without the reference's dispatch mode, since torch runs a few other operators
    under that mode. The second of these runs must follow the tape of the first.
    """
    tapes: list[Any] = []

    def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run, reference = both(core, lambda: original(*args, **kwargs))
        compare(run.tape, reference)
        alone = Run(core, lambda: original(*args, **kwargs))
        again = Run(core, lambda: original(*args, **kwargs), (alone.tape,))
        assert again.follows, "the same forward departs from its tape"
        tapes.append(run.tape)
        return run.out

    with contextlib.ExitStack() as patches:
        for layer in layers:
            patches.enter_context(mock.patch.object(layer, "forward", functools.partial(forward, layer.forward)))
        call()
    return tapes
