"""Megatron-Core on four processes, which split a model in two ways at once: all numbers are those without memplug."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.megatron_ranks import MIXTURE, assert_same, assert_sound, block, train

pytestmark = pytest.mark.distributed

STEPS = 10
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor and pipeline": {"tensor": 2, "pipeline": 2, "micro_batches": 4},
    "tensor, pipeline, interleaved": {"tensor": 2, "pipeline": 2, "chunks": 2, "micro_batches": 4},
    "tensor, distributed optimizer": {"tensor": 2, "distributed_optimizer": True, "micro_batches": 2},
    "pipeline and expert": {"pipeline": 2, "expert": 2, "micro_batches": 4, **MIXTURE},
    "tensor, sequence and expert": {"tensor": 2, "sequence": True, "expert": 2, **MIXTURE},
}
SHORT_RANK = 3
SHORT = {"short_of_host_memory": [SHORT_RANK, 5]}
CASES: dict[str, dict[str, Any]] = {
    "0": block(0.0, arena=False),
    "1": block(1.0, arena=True),
    "auto": block("auto", arena=True),
    "0, short": {**block(0.0, arena=False), **SHORT},
    "1, short": {**block(1.0, arena=False), **SHORT},
}
SELECTION = [
    ("tensor, pipeline, interleaved", ("1", "0, short")),
    *(
        pytest.param(name, tuple(CASES) if short else ("0", "1", "auto"), marks=pytest.mark.long)
        for name, short in zip(LAYOUTS, (False, True, False, False, True), strict=True)
    ),
]


@pytest.mark.long
@pytest.mark.parametrize(("layout", "names"), SELECTION)
def test_losses_and_gradients_of_four_ranks_equal_those_without_memplug(layout, names, tmp_path):
    # in some cases a rank runs short of host memory midway: no rank may wait forever for another
    cases = {name: CASES[name] for name in names}
    ranks = train(tmp_path, {"steps": STEPS, **LAYOUTS[layout]}, {"without": None, **cases}, processes=4)
    assert len(set(ranks[0]["without"]["digests"])) == STEPS, "it trains: every step differs"
    for name in names:
        for rank in ranks:
            assert_same(rank[name], rank["without"], exactly=name in ("0", "1", "0, short"))
        assert_sound([rank[name] for rank in ranks])
        refused = [rank[name]["report"]["host_refusals"] > 0 for rank in ranks]
        assert refused == [number == SHORT_RANK and "short" in name for number in range(4)]
    for rank in ranks if "experts" not in LAYOUTS[layout] else ():  # the number of tokens of an expert never repeats
        if "1" in names:
            assert rank["1"]["report"]["arena_served"] > 0
        if "auto" in names:
            report = rank["auto"]["report"]
            assert report["offloaded_step_bytes"] == pytest.approx(report["expected_step_bytes"], rel=0.02)
    if "1, short" in names:
        assert ranks[0]["1, short"]["shares"][-1] < 0.9 < 1.0 == ranks[0]["1, short"]["shares"][4]
