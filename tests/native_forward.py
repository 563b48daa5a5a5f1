"""One forward under the native core's observer, without a frame or an executor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Watcher:
    """What a native forward tells, which nobody needs here."""

    def time(self, index: int, over: bool) -> None:
        pass

    def before_foreign_write(self, storage: int, tensor: torch.Tensor) -> None:
        pass

    def is_transparent(self, tensor: torch.Tensor) -> bool:
        return False


class Run:
    """One forward under a native observer, and what it saved."""

    def __init__(self, core: Any, call: Callable[[], Any], known: tuple[Any, ...] = ()):
        self.saved: list[torch.Tensor] = []
        self.watcher = Watcher()
        transfer = core.Transfer(core.cpu_streams(), core.HostRows(lambda nbytes: False))
        region = core.Region()
        region.opaque = True  # nothing is captured
        self.forward = core.Frame(list(known), self.watcher, core.Flow(transfer, "cpu", 1), region, False)
        packed = self.forward.pack()
        self.objects: list[Any] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            self.saved.append(tensor)
            self.objects.append(packed(tensor))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self.forward.begin()
            try:
                self.out = call()
                self.tape = self.forward.finish()
            finally:
                self.forward.end()
        self.follows = self.forward.followed is not None
        self.forward.close(False)

    def restored(self, captured: dict[int, bool], substitute: Callable[[int], Any]) -> dict[int, torch.Tensor]:
        """What a recompute pass gives."""
        self.forward.decide(captured, [])
        self.forward.replay({}, [], substitute)
        return self.forward.restored()


class Keeps(torch.autograd.Function):
    """Keeps tensors for backward as they are; returns its first argument, which needs a gradient, again."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return one * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, *(None for _ in ctx.saved_tensors)
