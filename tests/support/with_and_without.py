"""Trainings with memplug and without, for a worker that runs each as a case, and whether they are the same."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.support.launching import launch

ALPHAS: dict[str, float | str] = {"0": 0.0, "1": 1.0, "half": 0.5, "auto": "auto"}
EXACT = ["0", "1", "auto"]
"""Of these: to the bit."""
Cases = dict[str, dict[str, Any]]


def block(alpha: float | str, **tokenwise: Any) -> dict[str, Any]:
    """That swaps even tensors of tiny models."""
    tokenwise |= {"alpha": alpha, "min_offload_bytes": 256}
    return {"enabled": True, "plan_dir": False, "arena": {"enabled": False}, "tokenwise": tokenwise}


def cases_of(programs: Mapping[str, dict[str, Any]], alphas: Iterable[str] = EXACT, **tokenwise: Any) -> Cases:
    """Of each program "NAME none", without memplug, and "NAME ALPHA" with the blocks that have these fields."""
    return {
        f"{name} {alpha}": {**case, "memplug": block(ALPHAS[alpha], **tokenwise) if alpha != "none" else None}
        for name, case in programs.items()
        for alpha in ("none", *alphas)
    }


def run(worker: str, folder: Path, cases: Cases, *options: str, **env: str) -> dict[str, Any]:
    """What a module of tests.support that runs `FOLDER CASES` by itself left in `FOLDER/results.pt`."""
    arguments = [f"tests.support.{worker}", folder, json.dumps(cases), *options]
    launch(arguments, launcher="python", module=True, env=env)
    return torch.load(folder / "results.pt", weights_only=False)


def assert_same(plain: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Losses and gradients of every step, to the bit, of a training whose steps differ."""
    assert len(set(plain["gradients"])) == len(plain["gradients"]), "it trains: each step is another"
    assert found["losses"] == plain["losses"]
    assert found["gradients"] == plain["gradients"]
