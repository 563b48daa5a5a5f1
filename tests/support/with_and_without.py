"""Trainings with memplug and without, for a worker that runs each as a case, and their comparison."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.support.launching import launch

ALPHAS: dict[str, float | str] = {"0": 0.0, "1": 1.0, "half": 0.5, "auto": "auto"}
EXACT = ["0", "1", "auto"]
"""The alphas whose results are equal to the bit."""
Cases = dict[str, dict[str, Any]]


def block(alpha: float | str, **tokenwise: Any) -> dict[str, Any]:
    """Return a block that swaps even tensors of tiny models."""
    tokenwise |= {"alpha": alpha, "min_offload_bytes": 256}
    return {"enabled": True, "plan_dir": False, "arena": {"enabled": False}, "tokenwise": tokenwise}


def cases_of(programs: Mapping[str, dict[str, Any]], alphas: Iterable[str] = EXACT, **tokenwise: Any) -> Cases:
    """Return the cases of each program: "NAME none", without memplug, and "NAME ALPHA", with `block`'s block."""
    return {
        f"{name} {alpha}": {**case, "memplug": block(ALPHAS[alpha], **tokenwise) if alpha != "none" else None}
        for name, case in programs.items()
        for alpha in ("none", *alphas)
    }


def run(worker: str, folder: Path, cases: Cases, *options: str, **env: str) -> dict[str, Any]:
    """Run `FOLDER CASES` in a module of tests.support, and return its `FOLDER/results.pt`."""
    arguments = [f"tests.support.{worker}", folder, json.dumps(cases), *options]
    launch(arguments, launcher="python", module=True, env=env)
    return torch.load(folder / "results.pt", weights_only=False)


def assert_same(plain: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Assert that losses and gradients of every step are equal, to the bit, in a training whose steps differ."""
    assert len(set(plain["gradients"])) == len(plain["gradients"]), "it trains: each step is another"
    assert found["losses"] == plain["losses"]
    assert found["gradients"] == plain["gradients"]
