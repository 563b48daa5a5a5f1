"""A model that itself reports which layer runs, to check the places that the recorder notes for operators.

The model reports in its forwards, and by hooks on every node of its graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memplug.hooks.places import Places
from memplug.profile.recorder import Detail, Recorder
from memplug.profile.trace import Fingerprint, Pass, Trace

Where = tuple[Pass, int, int]  # pass, micro-batch, layer


class Truth:
    """Counts the operators between two reports of the model.

    Attributes:
        running: the pass and micro-batch, set by the test.
    """

    def __init__(self, recorder: Recorder):
        self._recorder = recorder
        self._spans: list[tuple[Where | None, int]] = []
        self._now: Where | None = None
        self._seen = 0
        self.running = (Pass.OTHER, -1)

    def begin(self) -> None:
        """Begin to count, together with the recording."""
        self._seen = self._recorded()
        self._spans.clear()
        self._now = None

    def at(self, layer: int | None) -> Where | None:
        """Report the layer of the operators that follow (-1: outside of layers, None: unknown).

        Returns:
            The place that was reported before.
        """
        return self._to(None if layer is None else (*self.running, layer))

    def back(self, before: Where | None) -> None:
        """Return to a place that `at` returned."""
        self._to(before)

    def operators(self) -> int:
        """Return how many operators there were since the beginning."""
        self._to(self._now)
        return sum(count for _, count in self._spans)

    def _to(self, where: Where | None) -> Where | None:
        before, self._now = self._now, where
        seen = self._recorded()
        self._spans.append((before, seen - self._seen))
        self._seen = seen
        return before

    def _recorded(self) -> int:
        """Return the number of operators of the recording: so far, or of the whole recording once it has ended."""
        return self._recorder._native.running_operator() + 1 if self._recorder.recording else self._seen

    def watch_nodes(self, end: torch.Tensor, begins: list[torch.Tensor], layer: int) -> None:
        """Report a layer for all nodes of the graph between `end` and the tensors `begins`."""
        known, ahead = {x.grad_fn for x in begins}, [end.grad_fn]
        while ahead:
            node = ahead.pop()
            if node is None or node in known or node.name() == "torch::autograd::AccumulateGrad":
                continue
            known.add(node)
            node.register_prehook(lambda *_: self.at(layer) and None)
            node.register_hook(lambda *_: self.at(None) and None)
            ahead += [following for following, _ in node.next_functions]

    def watch_parameters(self, module: nn.Module, layer: int) -> None:
        """Report a layer for the nodes that accumulate a module's gradients."""
        for parameter in module.parameters():
            parameter.register_hook(lambda *_: self.at(layer) and None)
            parameter.register_post_accumulate_grad_hook(lambda *_: self.at(None) and None)

    def check(self, trace: Trace) -> dict[Where, int]:
        """Assert that the trace has each operator at the place that the model reported; return the counts by place.

        Raises:
            AssertionError: names the first operator that the trace has in another place.
        """
        names = [trace.names[name] for name in trace.operators["name"]]
        assert self.operators() == len(names)
        counts: dict[Where, int] = {}
        index = 0
        for expected, count in self._spans:
            for _ in range(count):
                if expected is not None:
                    assert where(trace, index) == expected, f"operator {index}, {names[index]}"
                    counts[expected] = counts.get(expected, 0) + 1
                index += 1
        assert sum(counts.values()) > 0.8 * len(names), "too much is unknown to tell"
        return counts


def where(trace: Trace, index: int) -> Where:
    """Return the place of an operator."""
    row = trace.operators[index]
    phase = trace.phases[row["phase"]]
    return phase.kind, phase.micro_batch, int(row["layer"])


class Layer(nn.Module):
    """A layer that reports what it runs; with `fails` it raises in the middle.

    `inside`: its body runs in a checkpoint, reentrant (True) or not (False), or in none (None).
    """

    def __init__(self, truth: Truth, index: int, inside: bool | None):
        super().__init__()
        self.truth, self.index, self.inside, self.fails = truth, index, inside, False
        self.linear = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4) if index % 2 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inside is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.inside)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        before = self.truth.at(self.index)
        try:
            hidden = self.linear(x).relu()
            if self.fails:
                raise ValueError(self.index)
            y = self.other(hidden) + x
            self.truth.watch_nodes(y, [x], self.index)
            return y
        finally:
            self.truth.back(before)


class Network(nn.Module):
    """A stack of `Layer`; `around`: each is in a checkpoint, reentrant (True) or not (False), or in none (None)."""

    def __init__(self, truth: Truth, layers: int = 3, around: bool | None = None, inside: bool | None = None):
        super().__init__()
        self.truth, self.around, self.catches = truth, around, False
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList([Layer(truth, index, inside) for index in range(layers)])
        truth.watch_parameters(self.first, -1)
        for index, layer in enumerate(self.layers):
            truth.watch_parameters(layer, index)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.truth.at(-1)
        try:
            x = self.first(x).sin()
            self.truth.watch_nodes(x, [], -1)
            for layer in self.layers:
                try:
                    x = layer(x) if self.around is None else checkpoint(layer, x, use_reentrant=self.around)
                except ValueError:
                    if not self.catches:
                        raise
            y = x.cos()
            self.truth.watch_nodes(y, [x], -1)
            return y
        finally:
            self.truth.back(before)


class Told:
    """A network whose steps are recorded with `Places`."""

    def __init__(self, recorder: Recorder, **network: Any):
        self.recorder, self.truth = recorder, Truth(recorder)
        torch.manual_seed(0)
        self.model = Network(self.truth, **network)
        named = [(f"layers.{index}", layer) for index, layer in enumerate(self.model.layers)]
        self.places = Places(self.model, named, recorder)

    def begin(self) -> None:
        self.places.install()
        self.recorder.begin(Detail.REQUESTS)
        self.truth.begin()

    def end(self) -> Trace:
        self.truth.operators()
        trace = self.recorder.end(Fingerprint(), self.places.layers)
        self.places.remove()
        return trace

    def forward(self, micro_batch: int) -> torch.Tensor:
        """Run a forward and the loss, which is outside of the model but belongs to the micro-batch."""
        self.truth.running = (Pass.FORWARD, micro_batch)
        y = self.model(torch.ones(2, 4))
        self.truth.running = (Pass.OTHER, -1)
        self.truth.at(-1)
        loss = y.square().mean()
        self.truth.watch_nodes(loss, [y], -1)
        self.truth.at(None)
        return loss

    def backward(self, micro_batch: int, loss: torch.Tensor, **options: Any) -> None:
        self.truth.running = (Pass.BACKWARD, micro_batch)
        loss.backward(**options)
        self.truth.running = (Pass.OTHER, -1)
