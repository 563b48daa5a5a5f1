"""Hugging Face's models with flash-attn: attention runs once in a step, and gradients are equal to the bit.

Packed sequences are included.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.with_and_without import EXACT, assert_same, cases_of, run

pytestmark = pytest.mark.long

pytest.importorskip("transformers")

BATCHES = ["whole", "padded", "packed", "lengths"]
PROGRAMS = {
    **{f"flash-attn {kind}": {"implementation": "flash_attention_2", "batch": kind} for kind in BATCHES},
    **{f"flash-attn 3 {kind}": {"implementation": "flash_attention_3", "batch": kind} for kind in ("whole", "lengths")},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run("flash_attention_worker", tmp_path_factory.mktemp("flash_attention"), cases_of(PROGRAMS))


@pytest.mark.parametrize("alpha", EXACT)
@pytest.mark.parametrize("program", PROGRAMS)
def test_losses_and_gradients_equal_plain_training_to_the_bit(
    program: str, alpha: str, results: dict[str, Any]
) -> None:
    assert_same(results[f"{program} none"], results[f"{program} {alpha}"])


@pytest.mark.parametrize("alpha", EXACT)
@pytest.mark.parametrize("program", PROGRAMS)
def test_attention_runs_once_per_step(program: str, alpha: str, results: dict[str, Any]) -> None:
    plain, found = results[f"{program} none"], results[f"{program} {alpha}"]
    name = "FlashAttnFunc" if program.endswith("whole") else "FlashAttnVarlenFunc"
    assert found["functions"] == plain["functions"] == {f"{name} (3)" if "3" in program else name: 3}


@pytest.mark.parametrize("alpha", EXACT)
@pytest.mark.parametrize("program", PROGRAMS)
def test_no_region_is_opaque(program: str, alpha: str, results: dict[str, Any]) -> None:
    assert results[f"{program} {alpha}"]["report"]["opaque_regions"] == 0
