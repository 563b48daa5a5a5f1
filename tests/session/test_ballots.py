"""The log of ballots is the same on all ranks, however late they vote. Here, ranks are threads that share one store."""

from __future__ import annotations

import gc
import itertools
import logging
import pickle
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from memplug.errors import RanksError
from memplug.session import ballots
from memplug.session.ballots import Ballots, Voters, meet, named

MEMBERS = [2, 5, 7]


def voters(store: dist.Store, members: list[int] = MEMBERS) -> list[Voters]:
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(lambda rank: meet(store, members, rank, timeout_s=20), members))


def on_all(count: int, act: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(act, range(count)))


def tcp(folder: Path) -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)


def file(folder: Path) -> dist.Store:
    return dist.FileStore(str(folder / "store"), len(MEMBERS))


@pytest.mark.parametrize("make", [lambda folder: dist.HashStore(), tcp, file], ids=["hash", "tcp", "file"])
def test_all_ranks_get_the_same_verdict_from_all_votes(make: Callable[[Path], dist.Store], tmp_path: Path) -> None:
    store = make(tmp_path)
    logs = [Ballots(each) for each in voters(store)]

    def act(index: int) -> Any:
        found = []
        for begin in range(0, 100, 20):  # 20 ballots at once
            waiting = [logs[index].cast((index, number), list, 20.0) for number in range(begin, begin + 20)]
            found += [verdict() for verdict in waiting]
        return found

    assert on_all(3, act) == [[[(0, number), (1, number), (2, number)] for number in range(100)]] * 3
    for log in logs:
        log.close()


def test_remaining_ranks_give_the_verdict_if_the_last_voter_dies() -> None:
    first, second, gone = voters(dist.HashStore())
    logs = [Ballots(first), Ballots(second)]
    gone.store.set(f"1/{gone.own}", pickle.dumps(3))
    assert on_all(2, lambda index: logs[index].cast(index + 1, sum, 0.5)()) == [6, 6]
    assert not any(log.ended for log in logs)
    for log in logs:
        log.close()


def test_store_keeps_few_keys_of_old_ballots() -> None:
    store = dist.HashStore()
    logs = [Ballots(each) for each in voters(store)]
    for _ in range(3 * ballots.KEPT_BALLOTS):
        for verdict in [log.cast(1, min, 20.0) for log in logs]:
            verdict()
    assert store.num_keys() < 1.1 * ballots.KEPT_BALLOTS * (len(MEMBERS) + 2) + 20
    for log in logs:
        log.close()


@pytest.mark.parametrize("seed", range(4))
def test_late_vote_counts_on_all_ranks_or_on_none(seed: int) -> None:
    # the first rank stops waiting at about the time at which the last rank votes
    random_s = random.Random(seed).uniform
    limit_s = 0.05
    for _ in range(8):
        logs = [Ballots(each) for each in voters(dist.HashStore())]
        late_s = random_s(0.8, 1.4) * limit_s

        def act(index: int, logs: list[Ballots] = logs, late_s: float = late_s) -> list[Any]:
            found = []
            for number in itertools.count():
                if number == 2 and index == 2:
                    time.sleep(late_s)
                try:
                    found.append(logs[index].cast(index, list, limit_s if index == 0 else 20.0)())
                except RanksError as error:
                    return [*found, error.problem]
                if number == 5:
                    return found

        first, *others = on_all(3, act)
        assert others == [first, first]
        assert len(first) in (3, 6)
        for log in logs:
            log.close()


def test_departed_rank_is_named_and_ends_the_ballots_for_good(caplog: pytest.LogCaptureFixture) -> None:
    logs = [Ballots(each) for each in voters(dist.HashStore())]
    logs[1].close()
    with pytest.raises(RanksError, match="rank 5 takes no more steps"):
        logs[0].cast(1, min, 20.0)()
    for log in (logs[0], logs[2]):
        with pytest.raises(RanksError, match="rank 5 takes no more steps"):
            log.cast(1, min, 20.0)()
        assert log.ended
    assert [log.is_first_to_say() for log in (logs[2], logs[0])] == [True, False]
    for log in logs:
        log.close()


def test_expired_wait_names_all_missing_ranks(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ballots, "PATIENCE_S", 0.1)
    logs = [Ballots(each) for each in voters(dist.HashStore())]
    began = time.monotonic()
    with caplog.at_level(logging.WARNING), pytest.raises(RanksError, match="ranks 2 and 7 did not end the step"):
        logs[1].cast(1, min, 0.5)()
    assert 0.4 < time.monotonic() - began < 3
    assert "ranks wait for ranks 2 and 7" in caplog.text
    for log in logs:
        log.close()


def test_rank_without_more_batches_ends_later_ballots_at_once() -> None:
    logs = [Ballots(each) for each in voters(dist.HashStore())]
    before = [log.cast(1, min, 20.0) for log in logs]
    logs[1].part()
    assert [verdict() for verdict in before] == [1, 1, 1]
    began = time.monotonic()
    with pytest.raises(RanksError, match="rank 5 has no more batches"):
        logs[0].cast(1, min, 20.0)()
    assert time.monotonic() - began < 5
    for log in (logs[1], logs[2]):
        with pytest.raises(RanksError, match="rank 5 has no more batches"):
            log.cast(1, min, 20.0)()
    for log in logs:
        log.close()


def test_rejoined_ranks_vote_again() -> None:
    logs = [Ballots(each) for each in voters(dist.HashStore())]
    for _ in range(3):
        for log in logs:
            log.part()
        time.sleep(0.02)
        for log in logs:
            log.rejoin()
        time.sleep(0.05)
        waiting = [logs[0].cast(1, min, 20.0), logs[2].cast(1, min, 20.0)]
        time.sleep(0.05)
        waiting.append(logs[1].cast(1, min, 20.0))
        assert [verdict() for verdict in waiting] == [1, 1, 1]
    for log in logs:
        log.close()


def test_verdict_unreadable_on_one_rank_may_still_count_on_another() -> None:
    # the store closes after one rank has read the verdict, and before the other has
    first, second = voters(dist.HashStore(), [0, 1])

    class Cut:
        def __getattr__(self, name: str) -> Any:
            if name == "check":
                raise RuntimeError("the connection was closed")
            return getattr(second.store, name)

    logs = [Ballots(first), Ballots(replace(second, store=Cut()))]
    waiting = [log.cast(1, min, 20.0) for log in logs]
    assert waiting[0]() == 1
    with pytest.raises(RanksError, match="torch's store is gone: the connection was closed"):
        waiting[1]()
    assert [log.torn for log in logs] == [False, True]
    logs[1].close()
    with pytest.raises(RanksError):
        logs[0].cast(1, min, 0.1)()
    assert not logs[0].torn, "all ranks that act on its log have the same verdicts"
    logs[0].close()


def test_garbage_collected_ballots_end_their_threads() -> None:
    before = threading.active_count()
    logs = [Ballots(each) for each in voters(dist.HashStore())]
    assert threading.active_count() == before + 3
    del logs
    gc.collect()
    assert threading.active_count() == before


def test_ranks_can_meet_repeatedly_on_one_store() -> None:
    store = dist.HashStore()
    first, second = voters(store), voters(store)
    first[0].leave("x", "1")
    assert second[0].missing("x") == MEMBERS and first[0].missing("x") == MEMBERS[1:]


def test_lost_store_ends_the_ballots() -> None:
    store = tcp(Path())
    logs = [Ballots(each) for each in voters(store, [0, 1])]
    waiting = logs[0].cast(1, min, 20.0)
    del store
    gc.collect()
    with pytest.raises(RanksError, match="torch's store is gone"):
        waiting()
    assert logs[0].torn
    for log in logs:
        log.close()


def test_ranks_are_listed_in_words() -> None:
    assert [named(ranks) for ranks in ([3], [0, 1], [0, 1, 5])] == ["rank 3", "ranks 0 and 1", "ranks 0, 1 and 5"]
