"""The real Transformer Engine and flash-attn on a GPU: equal to the bit, and attention runs once in a step.

test_opaque_layers.py and test_flash_attention.py check the same with stand-ins.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.attention_kernels import DETERMINISTIC, FORWARD
from tests.support.simulated import cuda_is_simulated
from tests.support.with_and_without import ALPHAS, EXACT, assert_same, cases_of, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda_is_simulated(), reason="kernels of other packages are not simulated"),
    *(
        pytest.mark.skipif(not importlib.util.find_spec(name), reason=f"{name} is not installed")
        for name in ("transformer_engine", "flash_attn")
    ),
]

PROGRAMS: dict[str, dict[str, Any]] = {
    "Parts": {"layer": "Parts"},
    "Drops": {"layer": "Drops"},
    "Flash": {"layer": "Flash"},
    "Mixed": {"layer": "Mixed"},
    "Whole": {"layer": "Whole"},
    "delayed": {"layer": "Parts", "recipe": "DelayedScaling", "micro_batches": 2, "steps": 20},
    "current": {"layer": "Parts", "recipe": "Float8CurrentScaling", "micro_batches": 2},
    "blocks": {"layer": "Parts", "recipe": "Float8BlockScaling"},
}
BATCHES = ["whole", "padded", "packed", "lengths"]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run Transformer Engine with cuDNN's attention, or with its own unfused attention if cuDNN has none.

    Inside of regions its compiled functions run uncompiled, which rounds more often; so no run here compiles them.
    """
    programs = {name: {"device": "cuda", **case} for name, case in PROGRAMS.items()}
    cases = cases_of(programs, ALPHAS, **REGIONS) | {"checkpoint": {**programs["Parts"], "checkpoint": True}}
    chosen = {**DETERMINISTIC, "NVTE_FLASH_ATTN": "0", "TORCH_COMPILE_DISABLE": "1"}
    return run("opaque_layers_worker", tmp_path_factory.mktemp("own"), cases, "--installed", **chosen)


@pytest.fixture(scope="module")
def by_flash(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run Transformer Engine with flash-attn."""
    programs = {name: {"device": "cuda", **PROGRAMS[name]} for name in RUNS["by_flash"]}
    cases, chosen = cases_of(programs, ALPHAS, **REGIONS), {**DETERMINISTIC, "NVTE_FUSED_ATTN": "0"}
    return run("opaque_layers_worker", tmp_path_factory.mktemp("by_flash"), cases, "--installed", **chosen)


@pytest.fixture(scope="module")
def llamas(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run Hugging Face's Llama with flash-attn."""
    programs = {kind: {"implementation": "flash_attention_2", "batch": kind} for kind in BATCHES}
    cases = cases_of(programs, ALPHAS)
    return run("flash_attention_worker", tmp_path_factory.mktemp("llamas"), cases, "--installed", **DETERMINISTIC)


REGIONS = {"regions": ["layers.*"]}
RUNS = {"own": list(PROGRAMS), "by_flash": ["Parts", "Drops", "delayed"], "llamas": BATCHES}
EACH = [(run, program) for run, programs in RUNS.items() for program in programs]
each = pytest.mark.parametrize(("run", "program"), EACH, ids=[f"{run} {program}" for run, program in EACH])
Results = Callable[[str], dict[str, Any]]


@pytest.fixture
def results(request: pytest.FixtureRequest) -> Results:
    return request.getfixturevalue


@pytest.mark.parametrize("alpha", EXACT)
@each
def test_losses_and_gradients_equal_plain_training_to_the_bit(
    run: str, program: str, alpha: str, results: Results
) -> None:
    assert_same(results(run)[f"{program} none"], results(run)[f"{program} {alpha}"])


@pytest.mark.parametrize("alpha", ALPHAS)
@each
def test_attention_runs_once_per_step_and_no_region_is_opaque(
    run: str, program: str, alpha: str, results: Results
) -> None:
    plain, found = results(run)[f"{program} none"], results(run)[f"{program} {alpha}"]
    assert found["report"]["opaque_regions"] == 0
    assert found["functions"][FORWARD] == plain["functions"][FORWARD] > 0


def test_gradient_checkpointing_runs_attention_twice(own: dict[str, Any]) -> None:
    assert own["checkpoint"]["functions"][FORWARD] == 2 * own["Parts none"]["functions"][FORWARD]


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_fp8_scales_and_histories_equal_plain_training(program: str, alpha: str, own: dict[str, Any]) -> None:
    plain, found = own[f"{program} none"]["scales"], own[f"{program} {alpha}"]["scales"]
    assert len(found) == len(plain) and bool(plain) == (program == "delayed")
    assert all(map(torch.equal, found, plain))


@pytest.mark.parametrize("program", PROGRAMS)
def test_losses_with_half_the_rows_swapped_differ_only_by_rounding(program: str, own: dict[str, Any]) -> None:
    assert own[f"{program} half"]["losses"] == pytest.approx(own[f"{program} none"]["losses"], rel=1e-2)


@pytest.mark.parametrize("program", PROGRAMS)
def test_tensors_saved_by_units_are_offloaded(program: str, own: dict[str, Any]) -> None:
    assert own[f"{program} 1"]["report"]["offloaded_bytes"] > 0
