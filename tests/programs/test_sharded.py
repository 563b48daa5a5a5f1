"""Parameters that others shard or reduce: DistributedDataParallel, and FSDP2 with one unit a layer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.forking import launch_forked


@pytest.mark.long
def test_losses_and_gradients_are_those_without_memplug_under_ddp_and_fsdp2(tmp_path: Path) -> None:
    launch_forked(["tests.support.sharded_worker", tmp_path], module=True)
    for rank in (0, 1):
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(results) == 6
        for name, result in results.items():
            assert result["same"] and result["compared"] > 4 * 10, name
            report = result["report"]
            assert report["opaque_regions"] == 0 and report["recomputed_in_full"] == 0, name
            assert report["offloaded_bytes"] > 0, name
