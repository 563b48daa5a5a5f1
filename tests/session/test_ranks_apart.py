"""Real ranks, some of which do not train or take fewer steps: none hangs, and losses equal those without memplug."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.apart import BLOCKS, LIMIT_S, STOPS, assert_equal, run, same_decisions, warnings
from tests.support.apart_worker import BATCHES, MORE

pytestmark = pytest.mark.distributed


@pytest.mark.long
@pytest.mark.parametrize(
    ("processes", "alpha", "epochs", "late"),
    [(2, "auto", 2, False), (2, "1", 1, True), (3, "1", 2, False), (3, "auto", 1, True)],
)
def test_training_in_torch_join_is_unchanged_and_waits_for_no_rank(
    processes: int, alpha: str, epochs: int, late: bool, tmp_path: Path
) -> None:
    ranks = run(tmp_path, processes, kind="join", epochs=epochs, block=BLOCKS[alpha], late=late, timeout_s=120)
    assert all(rank["with"]["longest_s"] < 30 for rank in ranks), "a rank that waits does so for 60 s"
    for number, rank in enumerate(ranks):
        assert_equal(rank, exactly=alpha == "1")
        assert len(rank["with"]["losses"]) == epochs * (BATCHES + MORE * number)
    assert same_decisions([rank["with"] for rank in ranks])
    (line,) = warnings(ranks, STOPS)
    assert "rank 0 has no more batches" in line
    assert alpha != "auto" or all(rank["with"]["replans"] == 1 for rank in ranks), (
        "the plan was made before a rank stopped"
    )


@pytest.mark.parametrize("late", [False, True])
def test_torch_join_with_equal_batch_counts_does_not_end_the_votes(late: bool, tmp_path: Path) -> None:
    ranks = run(tmp_path, 2, kind="join", epochs=3, even=True, late=late)
    for rank in ranks:
        assert_equal(rank)
        assert rank["with"]["stopped"] is None and rank["with"]["replans"] == 1
    assert same_decisions([rank["with"] for rank in ranks])


@pytest.mark.parametrize("processes", [2, 3])
def test_ranks_with_more_steps_continue_with_the_last_decisions(processes: int, tmp_path: Path) -> None:
    ranks = run(tmp_path, processes, kind="uneven", limit_s=LIMIT_S)
    for rank in ranks:
        assert_equal(rank)
    assert same_decisions([rank["with"] for rank in ranks])
    assert len(warnings(ranks, STOPS)) == 1


@pytest.mark.long
@pytest.mark.parametrize("step", [1, 3, 7], ids=["in warm-up", "as plans are tried", "in stable"])
def test_late_rank_trains_on_with_the_same_decisions_as_the_others(step: int, tmp_path: Path) -> None:
    ranks = run(tmp_path, 3, kind="late", step=step, patience_s=0.5, limit_s=LIMIT_S)
    for rank in ranks:
        assert_equal(rank)
        assert "rank 0" in rank["with"]["stopped"]
    assert same_decisions([rank["with"] for rank in ranks])
    assert len(warnings(ranks, STOPS)) == 1
    (line,) = warnings(ranks, "ranks wait for rank 0")
    assert "stop planning" in line


@pytest.mark.parametrize("step", [1, 7], ids=["in warm-up", "in stable"])
def test_dead_rank_delays_other_ranks_at_most_by_the_time_limit(step: int, tmp_path: Path) -> None:
    *alive, dead = run(tmp_path, 3, kind="dies", step=step, limit_s=LIMIT_S)
    assert not dead
    for rank in alive:
        assert len(rank["losses"]) == BATCHES and rank["seconds"] < LIMIT_S + 5
        assert "rank 2 did not end the step" in rank["stopped"]
    assert same_decisions(alive)
    assert len(warnings(alive, STOPS)) == 1


@pytest.mark.long
@pytest.mark.parametrize("step", [1, 7], ids=["in warm-up", "in stable"])
def test_ranks_that_lose_the_store_continue_with_the_last_decisions(step: int, tmp_path: Path) -> None:
    ranks = run(tmp_path, 2, kind="storeless", step=step, talks=False)
    for rank in ranks:
        assert rank["error"] is None and len(rank["losses"]) == BATCHES and rank["together"] == 2
        assert "torch's store is gone" in rank["stopped"]
    assert same_decisions(ranks)
    assert warnings(ranks, STOPS)


@pytest.mark.long
@pytest.mark.parametrize("step", [1, 7], ids=["in warm-up", "in stable"])
def test_ranks_that_lose_the_store_stop_if_their_layers_communicate(step: int, tmp_path: Path) -> None:
    # collectives depend on the plan, so no rank may act on a later plan than another
    for rank in run(tmp_path, 2, kind="storeless", step=step, talks=True):
        assert "torch's store is gone" in rank["error"] and "from its last checkpoint" in rank["error"]
        assert len(rank["losses"]) <= step + 1 and rank["together"] == 2


@pytest.mark.long
def test_no_rank_waits_for_a_detached_one_and_ranks_can_attach_again(tmp_path: Path) -> None:
    began = time.monotonic()
    ranks = run(tmp_path, 3, kind="leaves", timeout_s=100)
    assert time.monotonic() - began < 40
    for rank in ranks:
        assert rank["again"]["replans"] == 1 and rank["again"]["stopped"] is None
    assert ["rank 2 takes no more steps" in (rank["first"]["stopped"] or "") for rank in ranks] == [True, True, False]
    assert len(warnings(ranks, STOPS)) == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("by", "ranks", "processes"), [("list", [0], 2), ("list", [1, 2], 3), ("group", [0, 2], 3), ("wrapper", [1, 2], 3)]
)
def test_only_ranks_of_the_group_attach(by: str, ranks: list[int], processes: int, tmp_path: Path) -> None:
    found = run(tmp_path, processes, kind="subset", by=by, ranks=ranks)
    for number, rank in enumerate(found):
        assert ("with" in rank) is (number in ranks)
        assert rank["warnings"] == []
        if number in ranks:
            assert_equal(rank)
            assert rank["with"]["replans"] == 1 and rank["with"]["stopped"] is None
    assert same_decisions([found[rank]["with"] for rank in ranks])


def test_ranks_in_separate_groups_do_not_wait_for_each_other(tmp_path: Path) -> None:
    for rank in run(tmp_path, 2, kind="roles"):
        assert rank["replans"] == 1 and rank["stopped"] is None and rank["warnings"] == []


@pytest.mark.long
def test_attach_by_one_rank_times_out_and_names_the_missing_ranks(tmp_path: Path) -> None:
    ranks = run(tmp_path, 3, kind="alone", after_s=6, timeout_s=3, patience_s=0.5)
    for rank in ranks:
        assert "ranks 1 and 2 did not attach in 3 s" in rank["error"] and "group=group" in rank["error"]
    assert 2.5 < ranks[0]["seconds"] < 6 and ranks[1]["seconds"] < 2, "those that come later do not wait"
    (line,) = warnings(ranks, "waits in `memplug.attach`")
    assert "rank 0 waits" in line and "for ranks 1 and 2" in line


def test_attach_waits_for_late_ranks(tmp_path: Path) -> None:
    ranks = run(tmp_path, 2, kind="alone", after_s=2, patience_s=0.5)
    assert [rank["error"] for rank in ranks] == [None, None]
    assert len(warnings(ranks, "for rank 1")) == 1


def test_rank_outside_the_group_is_refused(tmp_path: Path) -> None:
    inside, outside = run(tmp_path, 2, kind="outsider")
    assert inside["error"] is None
    assert "on rank 1 of 2" in outside["error"] and "Attach only on the ranks of the group" in outside["error"]
