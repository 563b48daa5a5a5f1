"""Runs one forward under the native core's observer, without an executor."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from memplug.tokenwise.engine.core import watching


class Watcher:
    """Stands in for the executor, which a native frame asks when its forward writes in place."""

    def is_scratch(self, tensor: torch.Tensor) -> bool:
        """Return True: no test here needs the value from before the write."""
        return True


class Run:
    """One forward under a native observer, and the tensors that it saved."""

    def __init__(self, core: Any, call: Callable[[], Any], known: tuple[Any, ...] = ()):
        self.saved: list[torch.Tensor] = []
        transfer = core.Transfer(core.cpu_streams(), core.HostRows(lambda nbytes: False))
        region = core.Region("")
        region.opaque = True  # nothing is captured
        self.flow = core.Flow(transfer, "cpu", 1, 2)
        self.forward = core.Frame(list(known), self.flow, region, Watcher())
        packed = self.forward.pack()
        self.objects: list[Any] = []

        this = weakref.ref(self)  # a collective's `Work` holds the hook too, and gloo's thread may release it last

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            run = this()
            assert run is not None, "its forward is over"
            run.saved.append(tensor)
            run.objects.append(packed(tensor))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            watching().begin()  # as an executor does
            self.forward.begin()
            try:
                self.out = call()
                self.forward.finish()
            finally:
                self.forward.end()
                watching().end()
        self.tape = self.forward.tape
        self.follows = self.forward.followed is not None
        self.forward.close(False)

    def restored(self, captured: dict[int, bool], substitute: Callable[[int], Any]) -> dict[int, torch.Tensor]:
        """Run a recompute pass and return the tensors that it restores."""
        self.forward.decide(captured, [])
        self.forward.replay_with(substitute)
        return self.forward.restored()


class Keeps(torch.autograd.Function):
    """Saves tensors for backward as they are, and returns its first argument, which needs a gradient, times 1."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return one * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, *(None for _ in ctx.saved_tensors)
