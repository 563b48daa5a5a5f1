"""One rank on the virtual device makes the memory requests of a rank of real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.forking import launch_forked
from tests.support.launching import launch

WORKER = "tests.support.requests_worker"
NUMBER_BYTES = 8
"""Bytes of a Python number, such as the 2 of `x * 2`: a host tensor, which a CPU run counts as the device's."""
GENERATOR_BYTES = torch.get_rng_state().nbytes
"""Bytes of a random generator's state, another host tensor."""
ATTENTION = "scaled_dot_product"


Requests = list[tuple[str, int, str]]
"""Pass, bytes and operator of each request."""


def _requests(folder: Path, device: str, rank: int = 0) -> dict[str, Requests]:
    """Return a rank's requests by program, once its programs have run."""
    found = json.loads((folder / f"{device}-{rank}.json").read_text())
    return {name: [tuple(each) for each in requests] for name, requests in found.items()}


def _compared(requests: Requests) -> list[tuple[str, int]]:
    """Return pass and bytes of the requests that both devices make, in order.

    Requests of an embedding's backward are sorted: the CPU makes its two requests in the opposite order of CUDA and
    the virtual device.
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


def test_llama_makes_the_same_requests_on_cpu_and_virtual_device(tmp_path: Path) -> None:
    for device in ("cpu", "virtual"):
        launch_forked([WORKER, device, tmp_path, "llama", "llama-sdpa"], processes=1, module=True)
    cpu, virtual = _requests(tmp_path, "cpu"), _requests(tmp_path, "virtual")
    assert len(_compared(cpu["llama"])) > 400
    assert _compared(virtual["llama"]) == _compared(cpu["llama"])
    # attention has different kernels on each device, which save different sums and lay out gradients differently
    assert _without_attention(virtual["llama-sdpa"]) == _without_attention(cpu["llama-sdpa"])


def _of_the_device(requests: Requests) -> list[tuple[str, int, str]]:
    return [
        (kind, nbytes, operator)
        for kind, nbytes, operator in requests
        if kind != "OTHER" and nbytes > NUMBER_BYTES and nbytes != GENERATOR_BYTES
    ]


def _without_attention(requests: Requests) -> list[tuple[str, int]]:
    return [
        (kind, nbytes)
        for kind, nbytes, operator in _of_the_device(requests)
        if ATTENTION not in operator and (kind, operator) != ("BACKWARD", "aten::reshape")
    ]


@pytest.mark.long
def test_virtual_zero_rank_makes_the_requests_of_a_real_rank(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    names = [f"zero-{stage}" for stage in range(4)]
    launch_forked([WORKER, "cpu", tmp_path, *names], module=True)
    launch_forked([WORKER, "virtual", tmp_path, *names], processes=1, module=True)
    cpu, virtual = _requests(tmp_path, "cpu"), _requests(tmp_path, "virtual")
    for name in names:
        assert len(_compared(cpu[name])) > 350
        assert _compared(virtual[name]) == _compared(cpu[name]), name


FEWEST = {"megatron-tensor": 900, "megatron-sequence": 900, "megatron-pipeline": 400, "megatron-expert": 1000}
"""The fewest requests of each Megatron-Core program."""


@pytest.mark.long
def test_virtual_megatron_ranks_make_the_requests_of_real_ranks(tmp_path: Path) -> None:
    """Cover tensor and pipeline parallel ranks, and experts with equally many tokens."""
    pytest.importorskip("megatron.core")
    launch_forked([WORKER, "cpu", tmp_path, *FEWEST], libraries="megatron", module=True)
    launch([WORKER, "virtual", tmp_path, *FEWEST], launcher="python", module=True)
    for rank in range(2):
        cpu, virtual = _requests(tmp_path, "cpu", rank), _requests(tmp_path, "virtual", rank)
        for name, fewest in FEWEST.items():
            compared = _without_masks if name == "megatron-expert" else _compared
            assert len(compared(cpu[name])) > fewest, f"{name} of rank {rank}"
            assert compared(virtual[name]) == compared(cpu[name]), f"{name} of rank {rank}"


def _without_masks(requests: Requests) -> list[tuple[str, int]]:
    """Leave out the scratch memory that the CPU's kernels take to select by a mask, or to sum a mask.

    Leave out requests up to 1 KiB too: the tensors of the balanced router, and its counts of tokens.
    """
    return [
        (kind, nbytes)
        for kind, nbytes, operator in _of_the_device(requests)
        if nbytes > 1024 and not operator.endswith(("masked_select", "sum.dim_IntList", "embedding_backward"))
    ]
