"""Drawn routings: how many tokens each expert gets."""

from __future__ import annotations

import numpy as np
import pytest

from memplug.errors import EstimateError
from memplug.predict.virtual.routing import Draws, Routing


@pytest.mark.parametrize("words", ["even", "uniform", "zipf", "zipf:0.5"])
def test_each_token_goes_to_as_many_different_experts_as_asked(words: str) -> None:
    draws = Draws(Routing.of(words))
    for tokens, chosen, experts in ((70_000, 2, 8), (100, 8, 8), (7, 1, 3)):
        counts = draws.counts(tokens, chosen, experts)
        assert counts.dtype == np.int64 and counts.shape == (experts,)
        assert counts.sum() == tokens * chosen and 0 <= counts.min() <= counts.max() <= tokens


def test_even_routing_never_varies_and_others_vary_reproducibly() -> None:
    for words, varies in (("even", False), ("uniform", True), ("zipf", True)):
        draws, again = (Draws(Routing.of(words)) for _ in range(2))
        drawn = [draws.counts(1000, 2, 8).tolist() for _ in range(3)]
        assert (len({*map(tuple, drawn)}) == 3) is varies
        assert drawn == [again.counts(1000, 2, 8).tolist() for _ in range(3)]


def test_zipf_draws_experts_in_proportion_to_their_weights() -> None:
    tokens = 200_000
    shares = Draws(Routing.of("zipf:2")).counts(tokens, 1, 4) / tokens
    weights = 1 / np.arange(1, 5) ** 2
    assert shares == pytest.approx(weights / weights.sum(), rel=0.03)
    uniform = Draws(Routing.of("uniform")).counts(tokens, 1, 4) / tokens
    assert uniform == pytest.approx([0.25] * 4, rel=0.03)


@pytest.mark.parametrize("recorded", [[700, 200, 100, 0], [1000, 500, 300, 200], [1000, 1000, 999, 1]])
def test_draws_around_recorded_counts_keep_shares_and_total(recorded: list[int]) -> None:
    draws, tokens = Draws(Routing()), 1000
    drawn = np.array([draws.around(np.array(recorded), tokens) for _ in range(200)])
    assert (drawn.sum(1) == sum(recorded)).all() and (drawn >= 0).all() and (drawn <= tokens).all()
    shares = np.array(recorded) / tokens
    deviation = np.sqrt(tokens * shares * (1 - shares))  # each token goes to a different expert or not
    assert drawn.mean(0) == pytest.approx(recorded, abs=0.3 * deviation.max())
    assert drawn.std(0) == pytest.approx(deviation, rel=0.3, abs=0.1)


@pytest.mark.parametrize(
    "words", ["", "zippy", "zipf:", "zipf:0", "zipf:-1", "zipf:inf", "zipf:x", "uniform:2", "even:1"]
)
def test_unknown_routing_is_an_error(words: str) -> None:
    with pytest.raises(EstimateError, match="there is no routing"):
        Routing.of(words)


@pytest.mark.parametrize("words", ["even", "uniform", "zipf:1", "zipf:0.25"])
def test_name_of_a_routing_gives_the_same_routing(words: str) -> None:
    assert str(Routing.of(words)) == words and Routing.of(str(Routing.of(words))) == Routing.of(words)
