"""Trains small models whose layers launch kernels of their own, with memplug and without, and writes what came of it to
`FOLDER/results.pt`.

`python -m tests.support.opaque_layers_worker FOLDER CASES`. `CASES`: a JSON object, name -> {"layer": a class of this
module, "recipe": of FP8, or null, "steps", "micro_batches": of a step, the forwards of all of which run before the
first backward, "memplug": a block, or null}.

Of each case: {"losses": of each micro-batch, "gradients": digests of each step's, "scales": of FP8, in the end,
"report", "functions": forwards of each Function in the last step, "flops": of its kernels}.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memplug
from tests.support import stand_in

stand_in.use()

import transformer_engine.pytorch as te  # noqa: E402
from transformer_engine.common import recipe as recipes  # noqa: E402
from transformer_engine.stand_in import calls  # noqa: E402

WIDTH, HEADS, TOKENS, SEQUENCES, LAYERS = 32, 4, 12, 2, 3


class Parts(nn.Module):
    """A decoder layer of Transformer Engine's modules, with residuals and dropout between them; [tokens, sequences,
    width].
    """

    def __init__(self, dropout: float = 0.0, width: int = WIDTH) -> None:
        super().__init__()
        self.qkv = te.LayerNormLinear(width, 3 * width, normalization="RMSNorm", bias=False)
        self.core = te.DotProductAttention(HEADS, width // HEADS, attention_dropout=dropout)
        self.projection = te.Linear(width, width, bias=False)
        self.mlp = te.LayerNormMLP(width, 2 * width, activation="swiglu", normalization="RMSNorm", bias=False)
        self.dropout = dropout

    def forward(self, x: torch.Tensor, first: bool | None = None) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, -1)) for each in self.qkv(x, is_first_microbatch=first).chunk(3, -1))
        attended = self.core(q.contiguous(), k.contiguous(), v.contiguous())
        y = self.projection(attended, is_first_microbatch=first)
        x = x + nn.functional.dropout(y, self.dropout)
        return x + self.mlp(x, is_first_microbatch=first)


class Drops(Parts):
    """Draws random numbers inside of attention and outside."""

    def __init__(self) -> None:
        super().__init__(0.1)


class Whole(nn.Module):
    """Transformer Engine's own layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = te.TransformerLayer(WIDTH, 2 * WIDTH, HEADS, hidden_dropout=0.0, attention_dropout=0.0)

    def forward(self, x: torch.Tensor, first: bool | None = None) -> torch.Tensor:
        return self.layer(x, is_first_microbatch=first)


class Model(nn.Module):
    """Layers in a row and a loss."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer() for _ in range(LAYERS)])

    def forward(self, x: torch.Tensor, first: bool | None) -> torch.Tensor:
        x = x * 1.0  # region inputs are not leaves
        for layer in self.layers:
            x = layer(x, first)
        return x.square().mean()


def digest(model: nn.Module) -> str:
    """Of all gradients."""
    parts = [p.grad.contiguous().cpu().numpy().tobytes() for p in model.parameters() if p.grad is not None]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def scales(model: nn.Module) -> list[torch.Tensor]:
    """Scales and amax histories of all modules, of forward and of backward."""
    metas = [part.fp8_meta for part in model.modules() if getattr(part, "fp8_meta", None)]
    states = [meta[key] for meta in metas for key in ("scaling_fwd", "scaling_bwd") if key in meta]
    fields = [getattr(state, name, None) for state in states for name in ("scale", "amax_history")]
    return [field.clone().cpu() for field in fields if field is not None]


def trained(case: dict[str, Any]) -> dict[str, Any]:
    """One case."""
    torch.manual_seed(0)
    model = Model(globals()[case["layer"]])
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    recipe = getattr(recipes, case["recipe"])() if case.get("recipe") else None
    block = case.get("memplug")
    attached = memplug.attach(model, block) if block is not None else contextlib.nullcontext()
    found: dict[str, Any] = {"losses": [], "gradients": []}
    with attached as session:
        for step in range(case.get("steps", 10)):
            calls.clear()
            torch.manual_seed(step)
            count = case.get("micro_batches", 1)
            inputs, losses = torch.randn(count, TOKENS, SEQUENCES, WIDTH), []
            for number, x in enumerate(inputs):
                with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
                    losses.append(model(x, number == 0 if count > 1 else None))
            for loss in losses:
                loss.backward()
            found["losses"] += [loss.item() for loss in losses]
            found["gradients"].append(digest(model))
            optimizer.step()
            optimizer.zero_grad()
            if session is not None:
                session.step()
        found["functions"], found["flops"] = dict(calls.functions), dict(calls.flops)
        found["report"] = session.report() if session is not None else None
    found["scales"] = scales(model)
    return found


if __name__ == "__main__":
    folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.save({name: trained(case) for name, case in cases.items()}, folder / "results.pt")
