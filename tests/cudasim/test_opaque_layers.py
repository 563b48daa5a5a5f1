"""Layers whose kernels no operator shows, with memplug on simulated CUDA.

The stand-ins of Transformer Engine and flash-attn queue their kernels on the current stream; memplug, on streams of its
own, copies the tensors that they save.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.with_and_without import EXACT, assert_same, cases_of, run

pytestmark = pytest.mark.gpu

SCHEDULES = [["lazy"], ["copyfirst"], ["computefirst"], ["random", 3]]
STEPS = 12  # "auto" decides in the first steps; enough steps remain for all schedules
PROGRAMS: dict[str, dict[str, Any]] = {
    "plain": {"layer": "Parts"},
    "FP8": {"layer": "Parts", "recipe": "DelayedScaling", "micro_batches": 2},
    "dropout": {"layer": "Drops"},
    "flash-attn": {"layer": "Flash"},
}
ON_CUDA = {name: {**program, "steps": STEPS, "device": "cuda"} for name, program in PROGRAMS.items()}
CASES = {
    # Without memplug, kernels run in the order in which they are queued, so one schedule is enough.
    name: {**case, "schedules": SCHEDULES if case["memplug"] else [["eager"]]}
    for name, case in cases_of(ON_CUDA, regions=["layers.*"]).items()
}
MISSING = ["OFFLOAD_FOR_COMPUTE", "RELEASE_FOR_OFFLOAD", "USE_FOR_PREFETCH"]
CASES |= {name: {**CASES["plain 1"], "missing": name} for name in MISSING}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run("opaque_layers_worker", tmp_path_factory.mktemp("opaque_layers"), CASES, DS_ACCELERATOR="cuda")


@pytest.mark.parametrize("alpha", EXACT)
@pytest.mark.parametrize("program", PROGRAMS)
def test_numbers_equal_those_without_memplug_under_every_schedule(
    program: str, alpha: str, results: dict[str, Any]
) -> None:
    plain, found = results[f"{program} none"], results[f"{program} {alpha}"]
    assert_same(plain, found)
    assert all(map(torch.equal, found["scales"], plain["scales"]))


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_access_of_a_unit_is_ordered(program: str, results: dict[str, Any]) -> None:
    for alpha in ("none", *EXACT):
        assert results[f"{program} {alpha}"]["violations"] == 0, alpha


@pytest.mark.parametrize("wait", MISSING)
def test_missing_wait_is_detected(wait: str, results: dict[str, Any]) -> None:
    assert results[wait]["violations"] > 0


@pytest.mark.parametrize("alpha", EXACT)
@pytest.mark.parametrize("program", PROGRAMS)
def test_no_region_is_opaque_and_attention_runs_once_per_step(
    program: str, alpha: str, results: dict[str, Any]
) -> None:
    plain, found = results[f"{program} none"]["functions"], results[f"{program} {alpha}"]
    attention = "FlashAttnFunc" if program == "flash-attn" else "FusedAttnFunc"
    assert found["functions"][attention] == plain[attention] > 0
    assert found["report"]["opaque_regions"] == 0


@pytest.mark.parametrize("program", PROGRAMS)
def test_tensors_saved_by_units_are_offloaded(program: str, results: dict[str, Any]) -> None:
    assert results[f"{program} 1"]["report"]["offloaded_bytes"] > 0
    assert results[f"{program} 1"]["functions"] == results[f"{program} none"]["functions"]
