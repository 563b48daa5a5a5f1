"""Answers a model's reads of tensor values on the virtual device, from a trace of values."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from memplug.errors import EstimateError
from memplug.predict.estimator.calls import Calls, ModuleCall, line
from memplug.predict.estimator.routed_experts import RECORD_ANEW, RoutedExperts, recorded_counts
from memplug.predict.estimator.values import COPY, NUMBER, Output, Read, Values, modules_of
from memplug.predict.virtual import VirtualDevice
from memplug.predict.virtual.routing import Routing

Reads = dict[tuple[str, str], list[Read]]
"""Reads by line and operator."""


class Answers:
    """Answers models that read tensor values, one model after the other, from one trace of values.

    Args:
        values: The trace. Each forward repeats it; but experts that run in a loop get tokens as likely as in the trace,
            drawn anew in each forward, as a training's steps differ. None: the device makes values up. Then each
            number is 1, and `VirtualDevice.assume_true` sets the fraction of a mask's elements that are true.
        routing: How tokens spread over experts that run in a loop, without a trace; None: their reads are answered as
            all others.

    Attributes:
        made_up: The operators that read a made-up value in a forward, each with its source line, such as "aten::nonzero
            at model.py:12". Reads of a condition, such as `if mask.any()`, are left out. Empty if there is a trace.
        repeated: The operators whose results had the same data-dependent sizes, those of the trace, in each forward.
    """

    def __init__(self, values: Values | None, routing: Routing | None = None):
        self._values, self._routing = values, routing
        self._recorded = recorded_counts(values) if values is not None else None
        self._experts: RoutedExperts | None = None
        self._calls_read = (
            {path: [_by_line(call) for call in calls] for path, calls in values.calls.items()} if values else {}
        )
        self._backward_read = _by_line(values.backward) if values else {}
        self._given: dict[tuple[Any, ...], list[Sequence[Output]]] = defaultdict(list)
        self.made_up: list[str] = []
        self.repeated: list[str] = []

    @contextlib.contextmanager
    def to(self, device: VirtualDevice, model: nn.Module) -> Iterator[None]:
        """Let the device answer the model's reads inside the context.

        Args:
            device: The virtual device.
            model: The model that runs on it.
        """
        modules = modules_of(model)
        if self._values is None:
            modules = {"": modules[""]}
        has_draws = self._routing is not None or self._recorded is not None
        self._experts = RoutedExperts(self._routing or Routing(), self._recorded) if has_draws else None
        watching = self._experts.watching(model) if self._experts is not None else contextlib.nullcontext()
        self._calls = Calls(modules, ended=self._check)
        device.answer_by(self._answer)
        try:
            with watching:
                yield
        finally:
            device.answer_by(None)
            self._calls.undo()

    def _answer(self, work: Any, waits: bool) -> list[torch.Tensor] | None:
        if self._experts is not None and (answered := self._experts.answer(work)) is not None:
            return answered
        call, at = self._calls.now, (line(), work.name)
        told = f"{work.name} at {at[0]}"
        if self._values is None and call is not None and call.path is not None:
            is_condition = work.name == NUMBER and work.inputs[0].dtype == "Bool"
            if waits and not is_condition and told not in self.made_up:
                self.made_up.append(told)
        if self._values is None or call is None:
            return None
        sizes = tuple(tuple(each.sizes) for each in work.inputs)
        outputs = self._in_backward(call, at, sizes) if call.path is None else self._of(call, at, sizes, waits)
        if outputs is None:
            return None
        if call.path is not None and any(each.values is None for each in outputs) and told not in self.repeated:
            self.repeated.append(told)
        return [each.tensor() for each in outputs]

    def _of(
        self, call: ModuleCall, at: tuple[str, str], sizes: tuple[Any, ...], waits: bool
    ) -> Sequence[Output] | None:
        """Return the outputs of the next recorded read that matches `call` and `at`.

        If the trace has no such read left, return None; raise instead if the program waits for the result.

        Args:
            call: The module call that reads.
            at: The source line and the operator.
            sizes: For each input of the operator, its sizes.
            waits: Whether the program waits for the result.

        Raises:
            EstimateError: The trace has no such read left, and the program waits for the result; or the recorded inputs
                have other sizes. Inputs are not compared if the operator reads a number.
        """
        found = self._reads_of(call).get(at, [])
        number = call.asked[at]
        if number >= len(found):
            if not waits:  # the program may never read the result
                return None
            raise EstimateError(
                f"{_where(call)} asks for {at[1]} at {at[0]}, and the trace of values has no more than {len(found)} "
                "answers",
                RECORD_ANEW,
                code="MP028",
            )
        call.asked[at] += 1
        read = found[number]
        if at[1] != NUMBER and read.inputs != sizes:
            raise EstimateError(
                f"{_where(call)}: {at[1]} at {at[0]} has inputs of sizes {_text(sizes)}, but the trace of values has "
                f"inputs of {_text(read.inputs)}",
                RECORD_ANEW,
                code="MP028",
            )
        given = self._given[at[1], sizes]
        if read.outputs not in given:
            given.append(read.outputs)
        return read.outputs

    def _reads_of(self, call: ModuleCall) -> Reads:
        calls = self._calls_read.get(call.path, [])
        if len(calls) > 1 and call.recomputes:
            raise EstimateError(
                f"{_where(call)} reads different values in each call, and the trace of values does not say which call "
                "a recompute pass repeats",
                "Estimate the modes keep and memplug.",
                code="MP028",
            )
        if len(calls) == 1:
            return calls[0]
        return calls[call.number] if call.number < len(calls) else {}

    def _in_backward(self, call: ModuleCall, at: tuple[str, str], sizes: tuple[Any, ...]) -> Sequence[Output] | None:
        """Return the recorded outputs for a read in backward; None if the trace does not determine them.

        Take the outputs from the next read that was recorded in backward, by this operator at this line. If there is
        none, assume that a recompute pass repeats a read of the forward. The trace does not say which read. So return
        outputs only if all reads of the forward by this operator, with inputs of these sizes, had the same outputs.

        Raises:
            EstimateError: The reads of the forward had different outputs, and the operator reads neither a number nor a
                copy.
        """
        found = self._backward_read.get(at, [])
        if call.asked[at] < len(found):
            call.asked[at] += 1
            return found[call.asked[at] - 1].outputs
        given = self._given.get((at[1], sizes), [])
        if len(given) > 1 and at[1] not in (NUMBER, COPY):
            raise EstimateError(
                f"a recompute pass runs {at[1]} again, and the trace of values has several answers for inputs of sizes "
                f"{_text(sizes)}",
                "Estimate the modes keep and full.",
                code="MP028",
            )
        return given[0] if len(given) == 1 else None

    def _check(self, call: ModuleCall) -> None:
        """Raise an EstimateError if a finished module call read fewer values at a line than the trace has there."""
        if self._values is None or call.recomputes:
            return
        for at, asked in call.asked.items():
            there = len(self._reads_of(call)[at])
            if asked < there and at[1] != COPY:
                raise EstimateError(
                    f"{_where(call)} asks for {at[1]} at {at[0]} {asked} times, but the trace of values has {there} "
                    "answers",
                    RECORD_ANEW,
                    code="MP028",
                )


def _by_line(reads: Iterable[Read]) -> Reads:
    found: Reads = defaultdict(list)
    for read in reads:
        found[read.line, read.operator].append(read)
    return dict(found)


def _where(call: ModuleCall) -> str:
    return f"module {call.path}" if call.path else "the model"


def _text(sizes: Iterable[Sequence[int]]) -> str:
    return ", ".join(f"{list(each)}" for each in sizes)
