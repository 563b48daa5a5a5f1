"""Runs several estimates one after the other: `tests.support.repeated_worker FOLDER`.

FOLDER/asked.json has the estimates' names. FOLDER/found.json gets one line of JSON for each result.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memplug
from memplug.errors import EstimateError
from memplug.predict.estimator.result import Estimate
from tests.support.virtual_devices import HIDDEN, Layers

NAMES = ("swapped", "all modes", "impossible", "failing")
BLOCK = {"enabled": True, "tokenwise": {"regions": ["layers.*"]}, "swap": {"enabled": False}}


class Failing(Layers):
    """A model whose backward fails while a frame and autograd hold tensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        x.register_hook(self.fail)
        return x * x

    def fail(self, gradient: torch.Tensor) -> None:
        """Raise an error, as a hook in backward."""
        raise RuntimeError("a backward that fails")


def make(name: str) -> Estimate:
    """Return the estimate of that name."""
    layers, gpu, modes, block = {
        "swapped": (3, "h200", ("memplug",), {"device_budget_gib": 5}),
        "all modes": (2, "a100", memplug.predict.estimator.MODES, {}),
        "impossible": (3, "h200", ("memplug", "keep"), {"device_budget_gib": 1}),
        "failing": (1, "h200", ("keep",), {}),
    }[name]

    def model() -> nn.Module:
        return (Failing if name == "failing" else Layers)(layers).to(torch.bfloat16)

    def inputs() -> torch.Tensor:
        return torch.empty(1, 8192, HIDDEN, dtype=torch.bfloat16, device="meta")

    return memplug.estimate(model, inputs, {**BLOCK, **block}, gpu, modes)


def plain(make: Callable[[], Estimate], kept: list[Any]) -> dict[str, Any]:
    """Return an estimate's values or its error's message; append the result or error to `kept`, as a program may do."""
    try:
        found = make()
    except EstimateError as error:
        kept.append(error)
        return {"error": str(error)}
    kept.append(found)
    modes = {mode: dataclasses.asdict(each) for mode, each in found.items()}
    return {**modes, "impossible": {mode: error.least_gib for mode, error in found.impossible.items()}}


def main() -> None:
    """Read the names, and write the results."""
    folder, kept = Path(sys.argv[1]), []
    found = [plain(lambda name=name: make(name), kept) for name in json.loads((folder / "asked.json").read_text())]
    (folder / "found.json").write_text("\n".join(json.dumps(each) for each in found))


if __name__ == "__main__":
    main()
