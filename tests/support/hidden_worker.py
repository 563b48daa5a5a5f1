"""Trains layers that exchange tokens with another rank around an expert whose kernels no operator shows.

The ranks differ: in some of the first steps one of them has no tokens.

Started on two ranks: `-m tests.support.hidden_worker FOLDER CASES`. `CASES`: a JSON list of [layer, number of layers,
routing, alpha].

Writes to `FOLDER/RANK.json`, for each case, {"differ": steps whose gradients differ from plain torch's, "exchanges":
how many each step ran, "opaque": opaque regions after each step}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import memplug
from tests.support.blocks import LAYERS, Layer, Stack, gradients, twin

TOKENS, STEPS = 12, 6
ROUTINGS = {  # by step: how many tokens of each rank go to the first rank
    "all, then half": [TOKENS, 6, 6, 6, 6, 6],
    "all for long": [TOKENS, TOKENS, TOKENS, TOKENS, 7, 5],
    "in turn": [TOKENS, 0, TOKENS, 0, 5, 6],
    "half": [6, 6, 6, 6, 6, 6],
    "ever others": [6, 5, 7, 4, 8, 3],
}
exchanges, step, routing = [0], [0], [""]


class Exchange(torch.autograd.Function):
    """Exchanges tokens, and their gradients in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, given: list[int], sent: list[int]) -> torch.Tensor:
        ctx.sizes = given, sent
        return _exchanged(x, given, sent)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        given, sent = ctx.sizes
        return _exchanged(gradient, sent, given), None, None


def _exchanged(x: torch.Tensor, given: list[int], sent: list[int]) -> torch.Tensor:
    exchanges[0] += 1
    out = x.new_empty(sum(given), x.shape[1])
    dist.all_to_all_single(out, x.contiguous(), given, sent)
    return out


class Squared(torch.autograd.Function):
    """Squares a tensor into new memory, unseen by the dispatcher."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return _squared(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient * ctx.saved_tensors[0]


def _squared(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    out.numpy()[...] = x.detach().numpy() ** 2
    return out


class HidingExchange(Exchange):
    """An exchange that fills its result unseen by the dispatcher."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, given: list[int], sent: list[int]) -> torch.Tensor:
        out = Exchange.forward(ctx, x, given, sent)
        hidden = torch.empty_like(out)
        hidden.numpy()[...] = out.detach().numpy()
        return hidden


class Function(Layer):
    """A layer whose expert is an autograd function."""

    exchange = Exchange

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(self.norm(x)).flatten(0, 1)
        kept = ROUTINGS[routing[0]][step[0]]
        mine = [kept, len(y) - kept]
        given = [mine[dist.get_rank()]] * 2
        back = self.exchange.apply(self.expert(self.exchange.apply(y, given, mine)), mine, given)
        return x + self.out(back.sigmoid()).view_as(x)

    def expert(self, x: torch.Tensor) -> torch.Tensor:
        """Run this rank's expert."""
        return Squared.apply(x.tanh()).sin()


class NoFunction(Function):
    """A layer whose expert is no autograd function, so the region is opaque on a rank that has tokens."""

    def expert(self, x: torch.Tensor) -> torch.Tensor:
        """Run this rank's expert."""
        return (x.tanh() * (_squared(x) if len(x) else x.square())).sin()


class Late(NoFunction):
    """A layer whose expert hides nothing in the first steps."""

    def expert(self, x: torch.Tensor) -> torch.Tensor:
        """Run this rank's expert."""
        return super().expert(x) if step[0] > 3 else x.tanh().sin()


class LateAtTimes(Late):
    """A layer that does not exchange in two of its first steps; no two of its forwards are alike."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if step[0] in (0, 3):
            return x + self.out((self.inner(self.norm(x)) * (1 + step[0])).sigmoid())
        return super().forward(x)


class ExchangeUnit(NoFunction):
    """A layer whose exchange launches a hidden kernel too, and so becomes a unit."""

    exchange = HidingExchange


class Sigmoid(NoFunction):
    """A layer that saves its output; a hook writes to the last layer's output before backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sigmoid()


def trained(layer: type[Layer], layers: int, alpha: float | str) -> dict[str, Any]:
    """Train one case and return its results."""
    torch.manual_seed(0)
    model = Stack(layers, layer)
    reference = twin(model)
    if layer is Sigmoid:
        model.layers[-1].register_forward_hook(lambda module, args, out: out.mul_(2))
    block = {
        "enabled": True,
        "plan_dir": False,
        "arena": {"enabled": False},
        "tokenwise": {"regions": LAYERS, "alpha": alpha, "min_offload_bytes": 1},
    }
    differ, counted, opaque = [], [], []
    with memplug.attach(model, block) as session:
        for number in range(STEPS):
            step[0], exchanges[0] = number, 0
            torch.manual_seed(10 * number + dist.get_rank())
            x = torch.randn(2, TOKENS // 2, 16)
            model(x).backward()
            counted.append(exchanges[0])
            reference(x).backward()
            ours, theirs = gradients(model), gradients(reference)
            if ours.keys() != theirs.keys() or not all(torch.equal(ours[name], theirs[name]) for name in ours):
                differ.append(number)
            opaque.append(session.report().tokenwise.opaque_regions)
            session.step()
    return {"differ": differ, "exchanges": counted, "opaque": opaque}


def main() -> None:
    """Run all cases on this rank."""
    dist.init_process_group("gloo")
    found = []
    for layer, layers, name, alpha in json.loads(sys.argv[2]):
        routing[0] = name
        found.append(trained(globals()[layer], layers, alpha))
    (Path(sys.argv[1]) / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
