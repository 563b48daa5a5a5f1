"""Hugging Face's models with flash-attn under memplug: attention runs once in a step, gradients are to the bit, packed
sequences included.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.support.launching import launch

pytest.importorskip("transformers")

BATCHES = ["whole", "padded", "packed", "lengths"]
ALPHAS = {"0": 0.0, "1": 1.0, "auto": "auto"}
PROGRAMS = {
    **{f"flash-attn {kind}": ("flash_attention_2", kind) for kind in BATCHES},
    **{f"flash-attn 3 {kind}": ("flash_attention_3", kind) for kind in ("whole", "lengths")},
}

OF_THE_TAPE = [name for name in PROGRAMS if not name.endswith("packed")]


def block(alpha: float | str) -> dict[str, Any]:
    tokenwise = {"alpha": alpha, "min_offload_bytes": 256}
    return {"enabled": True, "plan_dir": False, "arena": {"enabled": False}, "tokenwise": tokenwise}


CASES = {
    f"{name} {alpha}": {
        "implementation": implementation,
        "batch": kind,
        "memplug": block(ALPHAS[alpha]) if alpha != "none" else None,
    }
    for name, (implementation, kind) in PROGRAMS.items()
    for alpha in ("none", *ALPHAS)
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("flash_attention")
    launch(["tests.support.flash_attention_worker", folder, json.dumps(CASES)], launcher="python", module=True)
    return torch.load(folder / "results.pt", weights_only=False)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_losses_and_gradients_are_those_without_memplug_to_the_bit(
    program: str, alpha: str, results: dict[str, Any]
) -> None:
    plain, found = results[f"{program} none"], results[f"{program} {alpha}"]
    assert found["losses"] == plain["losses"]
    assert found["gradients"] == plain["gradients"]


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("program", OF_THE_TAPE)
def test_attention_runs_once_in_a_step(program: str, alpha: str, results: dict[str, Any]) -> None:
    plain, found = results[f"{program} none"], results[f"{program} {alpha}"]
    name = "FlashAttnFunc" if program.endswith("whole") else "FlashAttnVarlenFunc"
    assert found["functions"] == plain["functions"] == {f"{name} (3)" if "3" in program else name: 3}


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("program", OF_THE_TAPE)
def test_no_region_is_opaque(program: str, alpha: str, results: dict[str, Any]) -> None:
    assert results[f"{program} {alpha}"]["report"]["opaque_regions"] == 0
