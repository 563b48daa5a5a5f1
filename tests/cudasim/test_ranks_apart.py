"""Ranks on simulated CUDA, over NCCL's stand-in, some of which do not train, or train for fewer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cudasim.forked import ranks_on_cuda
from tests.support.apart import BLOCKS, LIMIT_S, STOPS, assert_equal, run, same_decisions, warnings

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]


@pytest.fixture(scope="module")
def launch() -> Iterator[Callable[..., str]]:
    """Yield a function that runs a module on ranks."""
    with ranks_on_cuda("deepspeed") as launch:
        yield launch


@pytest.mark.parametrize(("alpha", "late"), [("auto", False), ("1", True)])
def test_training_under_join_equals_that_without_memplug(
    alpha: str, late: bool, tmp_path: Path, launch: Callable[..., str]
) -> None:
    ranks = run(
        tmp_path, 2, launch, kind="join", epochs=2, block=BLOCKS[alpha], backend="nccl", late=late, timeout_s=120
    )
    for rank in ranks:
        assert_equal(rank, exactly=alpha == "1")
    assert same_decisions([rank["with"] for rank in ranks])
    assert len(warnings(ranks, STOPS)) == 1


@pytest.mark.parametrize("by", ["list", "wrapper"])
def test_only_the_ranks_of_the_group_attach(by: str, tmp_path: Path, launch: Callable[..., str]) -> None:
    one, other = run(tmp_path, 2, launch, kind="subset", by=by, ranks=[0], backend="nccl")
    assert_equal(one)
    assert one["with"]["stopped"] is None and one["warnings"] == other["warnings"] == []


def test_ranks_with_more_steps_keep_the_agreed_decisions(tmp_path: Path, launch: Callable[..., str]) -> None:
    ranks = run(tmp_path, 2, launch, kind="uneven", backend="nccl", limit_s=LIMIT_S)
    for rank in ranks:
        assert_equal(rank)
    assert same_decisions([rank["with"] for rank in ranks])
    assert len(warnings(ranks, STOPS)) == 1
