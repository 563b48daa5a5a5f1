"""One rank on the virtual device asks for the memory that a rank of real processes asks for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.launching import launch

WORKER = "tests.support.requests_worker"
NUMBER_BYTES = 8
"""Numbers of a program, such as the 2 of `x * 2`, are tensors of the host, and so on the CPU alone of the device."""
GENERATOR_BYTES = torch.get_rng_state().nbytes
"""States of generators are there, too."""
ATTENTION = "scaled_dot_product"


def _requests(
    folder: Path, processes: int, names: list[str], rank: int = 0
) -> list[dict[str, list[tuple[str, int, str]]]]:
    """Of a rank, on the CPU and on the virtual device: pass, bytes and operator by program. On the CPU all ranks run,
    once in a folder.
    """
    env = {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "localhost"}
    if (folder / f"cpu-{rank}.json").is_file():
        pass
    elif processes > 1:
        launch([WORKER, "cpu", folder, *names], processes=processes, module=True, env=env)
    else:
        launch([WORKER, "cpu", folder, *names], launcher="python", module=True, env=env)
    ranks = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(processes)}
    launch([WORKER, "virtual", folder, *names], launcher="python", module=True, env=env | ranks)
    found = [json.loads((folder / f"{device}-{rank}.json").read_text()) for device in ("cpu", "virtual")]
    return [{name: [tuple(each) for each in requests] for name, requests in one.items()} for one in found]


def _compared(requests: list[tuple[str, int, str]]) -> list[tuple[str, int]]:
    """Pass and bytes of those that both devices have, in order.

    The backward of an embedding asks for its gradient, laid out by rows, and for its output: on the CPU the other way
    round than on CUDA, and on the virtual device.
    """
    kept = _of_the_device(requests)
    both, at = [], 0
    while at < len(kept):
        end = at + 1
        while "embedding_backward" in kept[at][2] and end < len(kept) and kept[end][2] == kept[at][2]:
            end += 1
        both += sorted((kind, nbytes) for kind, nbytes, _ in kept[at:end])
        at = end
    return both


def test_a_llama_asks_for_what_it_asks_for_on_the_cpu(tmp_path: Path) -> None:
    cpu, virtual = _requests(tmp_path, 1, ["llama", "llama-sdpa"])
    assert len(_compared(cpu["llama"])) > 400
    assert _compared(virtual["llama"]) == _compared(cpu["llama"])
    # attention has kernels of its own on each device, which save other sums, and lay gradients out otherwise
    assert _beside_attention(virtual["llama-sdpa"]) == _beside_attention(cpu["llama-sdpa"])


def _of_the_device(requests: list[tuple[str, int, str]]) -> list[tuple[str, int, str]]:
    return [
        (kind, nbytes, operator)
        for kind, nbytes, operator in requests
        if kind != "OTHER" and nbytes > NUMBER_BYTES and nbytes != GENERATOR_BYTES
    ]


def _beside_attention(requests: list[tuple[str, int, str]]) -> list[tuple[str, int]]:
    return [
        (kind, nbytes)
        for kind, nbytes, operator in _of_the_device(requests)
        if ATTENTION not in operator and (kind, operator) != ("BACKWARD", "aten::reshape")
    ]


@pytest.mark.long
def test_a_rank_of_zero_asks_for_what_one_of_two_processes_asks_for(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    names = [f"zero-{stage}" for stage in range(4)]
    cpu, virtual = _requests(tmp_path, 2, names)
    for name in names:
        assert len(_compared(cpu[name])) > 350
        assert _compared(virtual[name]) == _compared(cpu[name]), name


@pytest.mark.long
def test_a_rank_of_megatron_asks_for_what_one_of_two_processes_asks_for(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    names = ["megatron-tensor", "megatron-sequence"]
    cpu, virtual = _requests(tmp_path, 2, names)
    for name in names:
        assert len(_compared(cpu[name])) > 900
        assert _compared(virtual[name]) == _compared(cpu[name]), name


@pytest.mark.long
def test_each_stage_of_a_pipeline_asks_for_what_its_process_asks_for(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    name = "megatron-pipeline"
    for rank in range(2):
        cpu, virtual = _requests(tmp_path, 2, [name], rank)
        assert len(_compared(cpu[name])) > 400
        assert _compared(virtual[name]) == _compared(cpu[name]), f"stage {rank}"


@pytest.mark.long
def test_a_rank_of_experts_asks_for_what_its_process_asks_for_where_tokens_are_spread_evenly(tmp_path: Path) -> None:
    """But for scratch of the CPU's kernels that choose by a mask or sum one up.

    Below 1 KiB are the tensors of the router that is balanced there, and of the numbers that it counts.
    """
    pytest.importorskip("megatron.core")
    found = _requests(tmp_path, 2, ["megatron-expert"])
    cpu, virtual = (
        [
            (kind, nbytes)
            for kind, nbytes, operator in _of_the_device(one["megatron-expert"])
            if nbytes > 1024 and not operator.endswith(("masked_select", "sum.dim_IntList", "embedding_backward"))
        ]
        for one in found
    )
    assert len(cpu) > 1000 and virtual == cpu
