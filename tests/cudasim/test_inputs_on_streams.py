"""Regions whose inputs another stream makes; only code inside of the region, or after it, waits for that stream.

memplug offloads the inputs only after that wait, and no memory is reused while another stream reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.cudasim import device
from tests.cudasim.device import SCHEDULES, Schedule, scheduled
from tests.support.hidden import hidden
from tests.support.two_streams import train

pytestmark = pytest.mark.gpu

ORDERS = [*SCHEDULES, Schedule("random", 1)]
STEPS = 10


class Maker(nn.Module):
    """Makes the next region's input on another stream, without a wait for that stream."""

    def __init__(self, side: torch.cuda.Stream):
        super().__init__()
        self.lin, self.side = nn.Linear(32, 32), side

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            made = self.lin(x).sin()
        x.record_stream(self.side)
        return made


class Waiting(nn.Module):
    """A region whose first statement waits for the stream of its input."""

    def __init__(self, side: torch.cuda.Stream):
        super().__init__()
        self.up, self.down, self.side = nn.Linear(32, 64), nn.Linear(64, 32), side

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        main = torch.cuda.current_stream()
        main.wait_stream(self.side)
        x.record_stream(main)
        return x + self.down(self.up(x).tanh())


class LaterView(Waiting):
    """Takes a view of its input, and allocates an equal tensor, before its stream waits for the input's stream."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, like = x.view(-1, 32), torch.empty_like(x)
        main = torch.cuda.current_stream()
        main.wait_stream(self.side)
        x.record_stream(main)
        like.copy_(x.detach())
        return rows + self.down(self.up(rows).tanh()) * like


class Writing(Waiting):
    """Writes to its input in place after waiting."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        main = torch.cuda.current_stream()
        main.wait_stream(self.side)
        x.record_stream(main)
        y = self.up(x.clone())
        x.mul_(2)
        return x + self.down(y.tanh())


class Aside(Waiting):
    """Reads its input first on a third stream, which waits only for the stream that made the input."""

    def __init__(self, side: torch.cuda.Stream):
        super().__init__(side)
        self.third = torch.cuda.Stream()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        main = torch.cuda.current_stream()
        self.third.wait_stream(self.side)
        with torch.cuda.stream(self.third):
            y = self.up(x).tanh()
        x.record_stream(self.third)
        main.wait_stream(self.third)
        y.record_stream(main)
        x.record_stream(main)
        return x + self.down(y)


class RecordsFirst(Waiting):
    """Calls `record_stream` on its input before it waits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        main = torch.cuda.current_stream()
        x.record_stream(main)
        main.wait_stream(self.side)
        return x + self.down(self.up(x).tanh())


class WaitsItself(torch.autograd.Function):
    """Waits for the stream that made its argument, and saves the argument for backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, side: torch.cuda.Stream) -> torch.Tensor:
        main = torch.cuda.current_stream()
        main.wait_stream(side)
        x.record_stream(main)
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * x.exp(), None


class InFunction(Waiting):
    """Reads its input only in an autograd function, which waits by itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = WaitsItself.apply(x, self.side)
        return x + self.down(self.up(y).tanh())


class OfView(Waiting):
    """Reads a view of its input only in an autograd function, which waits by itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = WaitsItself.apply(x.view(-1, 32), self.side)
        return x + self.down(self.up(y).tanh())


class Filled(torch.autograd.Function):
    """Waits, then fills its result without operators, as an extension's kernel does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, side: torch.cuda.Stream) -> torch.Tensor:
        main = torch.cuda.current_stream()
        main.wait_stream(side)
        x.record_stream(main)
        ctx.save_for_backward(x)
        out = torch.empty_like(x)
        with hidden():
            torch.exp(x, out=out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * x.exp(), None


class InUnit(Waiting):
    """Reads its input only in a function that waits by itself; no operator shows the function's kernels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = Filled.apply(x, self.side)
        return x + self.down(self.up(y).tanh())


LAYERS = [Waiting, LaterView, Writing, Aside, RecordsFirst, InFunction, OfView, InUnit]


class Block(nn.Module):
    """A region that uses the other stream's tensor only if `reads` is set."""

    def __init__(self, side: torch.cuda.Stream, reads: bool):
        super().__init__()
        self.up, self.down, self.side, self.reads = nn.Linear(32, 64), nn.Linear(64, 32), side, reads

    def forward(self, x: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        if self.reads:
            torch.cuda.current_stream().wait_stream(self.side)
            x = x + second.cos()
        return x + self.down(self.up(x).tanh())


class SecondInput(nn.Module):
    """Another stream makes a second input of all regions, which the first two do not read.

    These two do not wait for the stream either.
    """

    def __init__(self, side: torch.cuda.Stream):
        super().__init__()
        self.maker = Maker(side)
        self.layers = nn.ModuleList(Block(side, i > 1) for i in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        second = self.maker(x)
        for layer in self.layers:
            x = layer(x, second)
        second.record_stream(torch.cuda.current_stream())
        return x


class SplitsOff(nn.Module):
    """A region with a tensor that another stream reads; only the model's end waits for that stream."""

    def __init__(self, side: torch.cuda.Stream):
        super().__init__()
        self.up, self.down, self.side = nn.Linear(32, 64), nn.Linear(64, 32), side

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        main, y = torch.cuda.current_stream(), self.up(x)
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            z = y.sin()
        return x + self.down(y.tanh()), z


class JoinsLast(nn.Module):
    """Waits for the other stream at its end; until backward, autograd keeps the tensors that this stream reads.

    So the model does not call `record_stream` on them.
    """

    def __init__(self, side: torch.cuda.Stream):
        super().__init__()
        self.layers = nn.ModuleList(SplitsOff(side) for _ in range(6))
        self.side = side

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        apart = []
        for layer in self.layers:
            x, z = layer(x)
            apart.append(z)
        main = torch.cuda.current_stream()
        main.wait_stream(self.side)
        for z in apart:
            z.record_stream(main)
            x = x + z.mean(1, keepdim=True)
        return x


MODELS = [SecondInput, JoinsLast]


def pairs(layer: type[nn.Module]) -> Callable[[torch.cuda.Stream], nn.Module]:
    return lambda side: nn.Sequential(*(make(side) for _ in range(4) for make in (Maker, layer)))


CASES = {
    **{layer.__name__: (pairs(layer), ["1", "3", "5"]) for layer in LAYERS},
    **{model.__name__: (model, ["layers.[0-4]"]) for model in MODELS},
}


@pytest.mark.parametrize("schedule", ORDERS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_models_are_free_of_races_without_memplug(case: str, schedule: Schedule) -> None:
    make, _ = CASES[case]
    before = device.violations()
    expected, _ = train(make, {"enabled": False}, STEPS)
    with scheduled(schedule):
        found, _ = train(make, {"enabled": False}, STEPS)
    assert device.violations() == before
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("schedule", ORDERS, ids=str)
@pytest.mark.parametrize("alpha", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_every_access_is_ordered_and_values_are_unchanged(case: str, alpha: float, schedule: Schedule) -> None:
    make, regions = CASES[case]
    expected, _ = train(make, {"enabled": False}, STEPS)
    tokenwise = {"alpha": alpha, "regions": regions, "min_offload_bytes": 256}
    alone = {"profiler": {"enabled": False}, "arena": {"enabled": False}}
    before = device.violations()
    with scheduled(schedule):
        found, report = train(make, {"enabled": True, "tokenwise": tokenwise, **alone}, STEPS)
    assert device.violations() == before
    assert all(map(torch.equal, found, expected))
    assert report["offloaded_bytes"] > 0
