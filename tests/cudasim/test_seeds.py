"""Many random schedules of the arena, a planning session and ZeRO 3: results are unchanged, every access is ordered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.cudasim.device import Schedule, scheduled
from tests.cudasim.forked import ranks_on_cuda
from tests.cudasim.training import CASES, reference, train
from tests.cudasim.zero import BLOCKS, case

pytestmark = [pytest.mark.gpu, pytest.mark.long]

SEEDS, AT_ONCE = 50, 10


@pytest.mark.parametrize("first", range(100, 100 + SEEDS, AT_ONCE))
@pytest.mark.parametrize("name", ["arena alone", "auto"])
def test_training_is_unchanged_under_random_schedules(name: str, first: int) -> None:
    expected = reference(name)
    for seed in range(first, first + AT_ONCE):
        with scheduled(Schedule("random", seed)):
            found = train(CASES[name])
        assert found.losses == expected.losses, seed
        for ours, theirs in zip(found.gradients, expected.gradients, strict=True):
            assert torch.equal(ours, theirs), seed


@pytest.mark.distributed
@pytest.mark.parametrize("processes", [1, 2])
def test_zero_3_training_is_unchanged_under_random_schedules(processes: int, tmp_path: Path) -> None:
    schedules = [("random", seed) for seed in range(100, 100 + SEEDS)]
    every = {name: case(3, memplug, processes, schedules) for name, memplug in BLOCKS.items()}
    with ranks_on_cuda("deepspeed") as launch:
        arguments = ["tests.support.training_worker", tmp_path, json.dumps(every)]
        launch(arguments, processes=processes, module=True, time_limit_s=900)
    for rank in range(processes):
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        for name, result in results.items():
            assert result["losses"] == results["without"]["losses"], name
            assert result["digest"] == results["without"]["digest"], name
            assert result["violations"] == 0, name
