"""Layers that run a part of their forward on a second stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import memplug


class Beside(nn.Module):
    """A layer that runs a part of its forward, `aside`, on another stream; subclasses may replace `aside`."""

    def __init__(self, side: torch.cuda.Stream):
        super().__init__()
        self.up, self.down, self.side = nn.Linear(32, 64), nn.Linear(64, 32), side

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        main, y = torch.cuda.current_stream(), self.up(x)
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            z = self.aside(y)
        y.record_stream(self.side)
        u = y.tanh()
        main.wait_stream(self.side)
        z.record_stream(main)
        return x + self.down(u * z)

    def aside(self, y: torch.Tensor) -> torch.Tensor:
        return y.sin() * y.cos()


def train(
    make: Callable[[torch.cuda.Stream], nn.Module], block: dict[str, Any], steps: int
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Train a model that is made with a second stream; return its losses and parameters, and memplug's report."""
    torch.manual_seed(0)
    model = make(torch.cuda.Stream()).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session, losses, report = memplug.attach(model, {"plan_dir": False, **block}), [], {}
    for step in range(steps):
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(step)).cuda()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        del loss, x
        if session is not None:
            session.step()
    torch.cuda.synchronize()
    if session is not None:
        report = session.report().as_dict()
        session.detach()
    return [value.cpu() for value in [*losses, *model.parameters()]], report
