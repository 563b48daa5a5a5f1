"""The native tapes of Megatron-Core's layers, on two processes, equal those that a dispatch mode records."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.forking import launch_forked

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")
pytestmark = pytest.mark.distributed

MIXTURE = {"experts": 8}
SUM, GATHER, SCATTER, MOVE = "allreduce_", "_allgather_base_", "_reduce_scatter_base_", "alltoall_base_"
# each layout, with the collectives of a layer's forward in order: attention, then MLP or experts
LAYOUTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "dense": ({}, []),
    "dropout": ({"fields": {"hidden_dropout": 0.1, "attention_dropout": 0.1}}, []),
    "tensor": ({"tensor": 2}, [SUM, SUM]),
    "tensor and sequence": ({"tensor": 2, "sequence": True}, [GATHER, SCATTER, GATHER, SCATTER]),
    "all-to-all": ({"expert": 2, **MIXTURE}, [GATHER, MOVE, MOVE, MOVE]),
    "all-gather": ({"expert": 2, "dispatcher": "allgather", **MIXTURE}, [GATHER, GATHER, GATHER, SCATTER]),
    "tensor, sequence and expert": (
        {"tensor": 2, "sequence": True, "expert": 2, **MIXTURE},
        [GATHER, SCATTER, SUM, GATHER, MOVE, MOVE, MOVE],
    ),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the findings of each rank, from one launch for all layouts."""
    folder = tmp_path_factory.mktemp("tapes")
    layouts = json.dumps({name: layout for name, (layout, _) in LAYOUTS.items()})
    launch_forked(["tests.support.tape_worker", folder, layouts], libraries="megatron", module=True)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tapes_of_megatron_layers_equal_the_reference_tapes(ranks: list[dict[str, Any]], layout: str) -> None:
    for rank in ranks:
        layers = rank[layout]
        assert not isinstance(layers, str), layers
        assert len(layers) == 2
        for layer in layers:
            names = [name.partition("::")[2] for name in layer["operators"] if name.startswith("c10d::")]
            assert names == LAYOUTS[layout][1]
            assert not layer["opaque"] and len(layer["operators"]) > 50
            assert len(layer["drawing"]) == (3 if layout == "dropout" else 0)
            assert ("aten::topk" in layer["operators"]) == ("experts" in LAYOUTS[layout][0])
