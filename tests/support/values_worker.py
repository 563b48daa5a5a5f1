"""Train a module that routes tokens by their values, and write the memory requests of one step.

    python -m tests.support.values_worker cpu|virtual FOLDER MODE...

On the CPU the values of a first step are recorded in `FOLDER/values.json`; the virtual device reads this file. Modes
are those of `memplug.estimate`. `FOLDER/DEVICE.json` gets mode -> bytes of each request of the thread that trains.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memplug
from memplug.predict.estimator import modes
from memplug.predict.estimator.answers import Answers
from memplug.predict.estimator.values import Values
from memplug.profile.trace import EventKind

TOKENS, HIDDEN, EXPERTS, LAYERS = 96, 32, 4, 3
SMALL_BYTES = 1024
"""Requests up to this size are ignored: they are numbers, and counters of the CPU's kernels."""
OF_THE_CPU_BYTES = 8 * TOKENS * HIDDEN, torch.get_rng_state().nbytes
"""Sizes that are ignored too: the counters of the CPU's `masked_select`, and a generator's state."""


class Router(nn.Module):
    """Sends each token to one expert; returns the probability and the expert."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(HIDDEN, EXPERTS)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.scores(x).softmax(-1).max(-1)


class RoutedLayer(nn.Module):
    """A layer that reads how many tokens each expert gets, and which tokens these are."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sure, chosen = self.router(x)
        out = x
        for expert, tokens in enumerate(torch.bincount(chosen, minlength=EXPERTS).tolist()):
            if tokens == 0:
                continue
            rows = (chosen == expert).nonzero().flatten()
            out = out.index_add(0, rows, self.experts[expert](x[rows]).relu() * sure[rows, None])
        return torch.cat((out, out)).relu()[: len(x)] if sure.mean().item() > 0.9 else out


class Routed(nn.Module):
    """A stack of routed layers, with a loss over the large values of the last layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(RoutedLayer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        for layer in self.layers:
            x = layer(x)
        large = torch.masked_select(x, x.detach() > x.detach().mean())
        return large.square().sum()


def _requests(mode: str, device: str, folder: Path) -> list[int]:
    torch.manual_seed(0)
    model, x = Routed().to(device), torch.randn(TOKENS, HIDDEN).to(device).requires_grad_()
    if device == "cpu":
        with memplug.record_values(model, folder / "values.json"):
            model(x).backward()
    with contextlib.ExitStack() as stack:
        if device == "virtual":
            from memplug.predict.virtual import VirtualDevice

            stack.enter_context(Answers(Values.read(folder / "values.json")).to(VirtualDevice.current(), model))
        modes.recompute(model.layers, mode)
        session = stack.enter_context(memplug.attach(model, _block(mode)))
        for number in range(4):
            if number == 2:
                session.record()
            model(x).backward()
            session.step()
        events = session.trace.events
    made = events[(events["kind"] == EventKind.MALLOC) & (events["thread"] == 0)]
    return [int(nbytes) for nbytes in made["nbytes"] if nbytes > SMALL_BYTES and nbytes not in OF_THE_CPU_BYTES]


def _block(mode: str) -> dict[str, Any]:
    tokenwise = {"enabled": mode == "memplug", "regions": ["layers.*"], "alpha": 0, "min_offload_bytes": 1 << 20}
    block = {"enabled": True, "plan_dir": False, "device_budget_gib": 1}
    return {**block, "tokenwise": tokenwise, "arena": {"enabled": False}}


def main() -> None:
    """Run the modes."""
    device, folder, names = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    if device == "virtual":
        from memplug.predict.virtual import VirtualDevice
        from tests.support.virtual_devices import SIMPLE

        VirtualDevice(SIMPLE)
    (folder / f"{device}.json").write_text(json.dumps({name: _requests(name, device, folder) for name in names}))


if __name__ == "__main__":
    main()
