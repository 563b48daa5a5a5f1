"""Real ranks whose batches take turns plan together, whether they have the same lengths in a step or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.apart import STOPS, assert_equal, run, same_decisions, warnings
from tests.support.turns import LENGTHS, RANDOM

pytestmark = pytest.mark.distributed

WAITS = {"profiler": {"wait_for_plans": True}}
SERVED = 0.98
OWN_STEPS = 12  # of each kind


@pytest.mark.parametrize("pattern", ["AAB", pytest.param("AB", marks=pytest.mark.long), RANDOM])
def test_ranks_with_the_same_kinds_in_turn_plan_and_serve_each(pattern: str, tmp_path: Path) -> None:
    ranks = run(tmp_path, 2, kind="turns", patterns=[pattern] * 2, steps=60, block=WAITS, talks=False)
    kinds = 3 if pattern == RANDOM else len(set(pattern))
    for rank in ranks:
        assert_equal(rank)
        assert rank["with"]["stopped"] is None
        assert rank["programs"] == rank["with"]["replans"] == kinds
        assert min(min(shares[OWN_STEPS:]) for shares in rank["served"].values()) >= SERVED
    assert ranks[0]["history"] == ranks[1]["history"] and same_decisions([rank["with"] for rank in ranks])
    assert not warnings(ranks, STOPS)


@pytest.mark.parametrize("patterns", [["AAB", "ABB"], ["AB", "BA"], ["A", "AB"]])
def test_ranks_with_different_lengths_in_a_step_plan_for_the_longest(patterns: list[str], tmp_path: Path) -> None:
    ranks = run(tmp_path, 2, kind="turns", patterns=patterns, steps=60, block=WAITS, talks=False)
    length = max(map(len, patterns))
    longest = {max(LENGTHS[pattern[step % len(pattern)]] for pattern in patterns) for step in range(length)}
    for rank in ranks:
        assert_equal(rank)
        assert rank["programs"] == rank["with"]["replans"] == len(longest)
        assert min(min(shares[2 * OWN_STEPS :], default=1.0) for shares in rank["served"].values()) >= SERVED
    assert ranks[0]["history"] == ranks[1]["history"]
    assert not warnings(ranks, STOPS)


@pytest.mark.parametrize("pattern", ["AAB", RANDOM])
def test_layers_that_communicate_run_the_same_settings_on_all_ranks(pattern: str, tmp_path: Path) -> None:
    ranks = run(tmp_path, 2, kind="turns", patterns=[pattern] * 2, steps=60, block=WAITS, talks=True)
    for rank in ranks:
        assert_equal(rank)
        assert rank["with"]["stopped"] is None
    assert pattern == RANDOM or [rank["with"]["replans"] for rank in ranks] == [2, 2]
    assert ranks[0]["history"] == ranks[1]["history"] and same_decisions([rank["with"] for rank in ranks])
