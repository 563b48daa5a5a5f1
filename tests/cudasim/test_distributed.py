"""DeepSpeed on simulated CUDA, in one process and two: training with memplug equals that without, to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cudasim.forked import ranks_on_cuda
from tests.cudasim.zero import BLOCKS, case

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]


@pytest.fixture(scope="module")
def launch() -> Iterator[Callable[..., str]]:
    """Yield a function that runs a module on ranks."""
    with ranks_on_cuda("deepspeed") as launch:
        yield launch


@pytest.mark.parametrize("processes", [1, 2])
def test_zero_training_is_unchanged_and_every_access_is_ordered(
    processes: int, tmp_path: Path, launch: Callable[..., str]
) -> None:
    every = {
        f"{stage} {name}": case(stage, memplug, processes) for stage in range(4) for name, memplug in BLOCKS.items()
    }
    arguments = ["tests.support.training_worker", tmp_path, json.dumps(every)]
    launch(arguments, processes=processes, module=True, time_limit_s=300)
    for rank in range(processes):
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        for name, result in results.items():
            plain = results[f"{every[name]['stage']} without"]
            assert result["losses"] == plain["losses"], name
            assert result["digest"] == plain["digest"], name
            assert result["violations"] == 0, name
            if every[name]["memplug"] is not None:
                report = result["report"]
                assert report["offloaded_bytes"] > 0 and report["recomputed_in_full"] == 0, name
                assert result["stages"][-1] == "stable" and report["arena_served"] > 0, name
