"""Parameters that DistributedDataParallel reduces or FSDP2 shards, and torch's context parallelism.

FSDP2 has one unit per layer. In context parallelism, parts of sequences go from rank to rank inside of attention.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.forking import launch_forked
from tests.support.sharded_worker import RINGS, SHORT_RANK


@pytest.mark.long
def test_ddp_and_fsdp2_numbers_equal_those_without_memplug(tmp_path: Path) -> None:
    launch_forked(["tests.support.sharded_worker", tmp_path], module=True)
    for rank in (0, 1):
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(results) == 6
        for name, result in results.items():
            assert result["same"] and result["compared"] > 4 * 10, name
            report = result["report"]
            assert report["opaque_regions"] == 0 and report["recomputed_in_full"] == 0, name
            assert report["offloaded_bytes"] > 0, name


@pytest.mark.long
def test_ring_attention_numbers_equal_those_without_memplug(
    tmp_path: Path,
) -> None:
    """Include an unbalanced ring, whose ranks run different operators, and a rank without host memory."""
    launch_forked(["tests.support.sharded_worker", tmp_path, "RING"], module=True, processes=4)
    for rank in range(4):
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        for way in RINGS:
            assert results[way]["as_whole"], "the ring itself is right"
            for case in ("0", "0.4", "1", "short"):
                result = results[f"{way} {case}"]
                assert result["same"] and result["compared"] > 4 * 10, (way, case)
                report = result["report"]
                assert report["opaque_regions"] == report["recomputed_in_full"] == 0, (way, case)
                assert (report["host_refusals"] > 0) == (rank == SHORT_RANK and case == "short")
                assert report["offloaded_bytes"] > 0 or case == "short", (way, case)
