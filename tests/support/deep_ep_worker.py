"""Trains layers whose tokens go to experts of both ranks by DeepEP's functions, with memplug and without.

Started on two ranks: `-m tests.support.deep_ep_worker FOLDER CASES`. deep_ep.py stands in for DeepEP. `CASES`: a JSON
object, name -> {"layer": a class of this module, "memplug": a block, or null}.

`FOLDER/RANK.json` gets for each case {"losses", "gradients": a digest of each step's gradients, "calls": counts of
DeepEP's kernels in the last step, "report": two fields of memplug's}.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import memplug
from tests.support import deep_ep
from tests.support.digests import digest

WIDTH, TOKENS, LAYERS, EXPERTS, CHOSEN, STEPS = 16, 24, 3, 4, 2, 12

fused_a2a = deep_ep.install()


class Experts(nn.Module):
    """A router, and two experts on each of two ranks, with a residual around them; [tokens, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS // 2, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS // 2, 2 * WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.exchanged(y, *self.router(y).softmax(-1).topk(CHOSEN))

    def expert(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """Run one of this rank's experts."""
        return nn.functional.silu(x @ self.up[number]) @ self.down[number]


class DeepEP(Experts):
    """A layer in which each rank gets a token once, and sums the outputs of the token's experts on that rank."""

    def exchanged(self, y: torch.Tensor, chances: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Send tokens to their experts and back."""
        group = dist.group.WORLD
        tokens, experts, weights, _, handle = fused_a2a.fused_dispatch(y, chosen, chances, EXPERTS, group)
        shares = [(weights * (experts == number)).sum(-1, keepdim=True) for number in range(EXPERTS // 2)]
        made = sum(share * self.expert(number, tokens) for number, share in enumerate(shares))
        return fused_a2a.fused_combine(made, group, handle)[0]


class HybridEP(Experts):
    """A layer in which each expert gets its tokens as one contiguous piece."""

    def exchanged(self, y: torch.Tensor, chances: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Send tokens to their experts and back."""
        routing = torch.zeros(len(y), EXPERTS, dtype=torch.bool).scatter(1, chosen, True)
        probs = torch.zeros(len(y), EXPERTS).scatter(1, chosen, chances)
        tokens, weights, _, counts, handle = fused_a2a.hybrid_ep_dispatch(
            x=y, routing_map=routing, probs=probs, group=dist.group.WORLD, num_local_experts=EXPERTS // 2
        )
        pieces = tokens.split(counts.tolist())
        made = torch.cat([self.expert(number, piece) for number, piece in enumerate(pieces)]) * weights[:, None]
        return fused_a2a.hybrid_ep_combine(made, handle, None, None)


class Model(nn.Module):
    """Layers in a row, and a loss."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer() for _ in range(LAYERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def trained(case: dict[str, Any]) -> dict[str, Any]:
    """Train one case; each rank has its own weights and tokens."""
    rank, block = dist.get_rank(), case.get("memplug")
    torch.manual_seed(rank)
    model = Model(globals()[case["layer"]])
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    attached = memplug.attach(model, block) if block is not None else contextlib.nullcontext()
    found: dict[str, Any] = {"losses": [], "gradients": [], "report": None}
    with attached as session:
        for step in range(STEPS):
            deep_ep.calls.clear()
            torch.manual_seed(10 * step + rank)
            loss = model(torch.randn(TOKENS, WIDTH, requires_grad=True) * 1.0)
            loss.backward()
            found["losses"].append(loss.item())
            found["gradients"].append(digest(model))
            optimizer.step()
            optimizer.zero_grad()
            if session is not None:
                session.step()
        found["calls"] = dict(deep_ep.calls)
        if session is not None:
            found["report"] = {name: session.report().as_dict()[name] for name in ("opaque_regions", "offloaded_bytes")}
    return found


def main() -> None:
    """Run all cases on this rank."""
    dist.init_process_group("gloo")
    results = {name: trained(case) for name, case in json.loads(sys.argv[2]).items()}
    (Path(sys.argv[1]) / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
