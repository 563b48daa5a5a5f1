"""DistributedDataParallel, FSDP2 and torch's context parallelism train as without memplug.

FSDP2 shards layer by layer. In context parallelism, attention passes parts of sequences from rank to rank.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.forking import launch_forked
from tests.support.sharded_worker import RINGS, SHORT_RANK


@pytest.mark.long
def test_ddp_and_fsdp2_train_as_without_memplug(tmp_path: Path) -> None:
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
def test_ring_attention_trains_as_without_memplug(
    tmp_path: Path,
) -> None:
    # the ranks of the unbalanced ring run different operators; in the case "short", one rank has no host memory
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
