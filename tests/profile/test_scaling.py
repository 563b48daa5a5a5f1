"""Sizes of requests are found as functions of the inputs' sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplug.profile.records import Fingerprint
from memplug.profile.scaling import BOUNDED, CONSTANT, Fit, Term, value_of
from memplug.sizes import BLOCK_BYTES


def fitted(inputs: Sequence[tuple[int, ...]], nbytes: Sequence[int]) -> tuple[Term | int, int, int]:
    """Return the term, the base and the factor of one request; instead of a term CONSTANT or BOUNDED."""
    fit = Fit(1)
    fit.add([np.array([0])], np.array(nbytes)[:, None], inputs)
    found = fit.scaling(np.array([max(nbytes)]))
    term = int(found.term[0])
    return found.terms[term] if term > 0 else term, int(found.base[0]), int(found.factor[0])


@pytest.mark.parametrize(
    ("inputs", "nbytes", "found"),
    [
        ([(1, 64), (1, 96)], [4096, 4096], (CONSTANT, 0, 0)),
        ([(1, 64), (1, 96)], [100, 500], (CONSTANT, 0, 0)),  # no function, but one block
        ([(1, 64), (1, 96)], [256, 384], ((1,), 0, 4)),  # one block, but in longer steps more
        ([(1, 64), (1, 96)], [6400, 9600], ((1,), 0, 100)),
        ([(1, 64), (1, 96)], [64 * 64 * 8, 96 * 96 * 8], ((1, 1), 0, 8)),
        ([(2, 64, 2, 64), (3, 64, 3, 64)], [2000, 3000], ((0,), 0, 1000)),
        ([(2, 64), (3, 96), (2, 96)], [12800, 28800, 19200], ((0, 1), 0, 100)),
        ([(2, 64), (3, 96), (2, 96)], [2 * 64 * 64, 3 * 96 * 96, 2 * 96 * 96], ((0, 1, 1), 0, 1)),
        ([(1, 64), (1, 96)], [6400 + 800, 9600 + 800], (BOUNDED, 0, 0)),  # two steps show no base
        ([(1, 64), (1, 96), (1, 80)], [7200, 10400, 8800], ((1,), 800, 100)),
        ([(1, 64), (1, 96), (1, 80)], [7200, 10400, 8900], (BOUNDED, 0, 0)),
        ([(1, 64), (1, 96)], [9600, 6400], (BOUNDED, 0, 0)),
        ([(1, 64), (1, 64)], [9600, 6400], (BOUNDED, 0, 0)),
    ],
)
def test_simplest_function_of_the_inputs_is_found(
    inputs: list[tuple[int, ...]], nbytes: list[int], found: tuple[Term | int, int, int]
) -> None:
    assert fitted(inputs, nbytes) == found


@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 900)), min_size=4, max_size=8, unique=True),
    term=st.sampled_from(((0,), (1,), (0, 1), (1, 1), (0, 1, 1))),
    factor=st.integers(BLOCK_BYTES, 10**6),
)
def test_found_function_gives_the_bytes_of_every_step(sizes: list[tuple[int, int]], term: Term, factor: int) -> None:
    nbytes = [factor * value_of(term, each) for each in sizes]
    found, base, slope = fitted(sizes, nbytes)
    if found == CONSTANT:
        assert len(set(nbytes)) == 1
    else:
        assert isinstance(found, tuple) and base == 0
        assert [slope * value_of(found, each) for each in sizes] == nbytes


def test_micro_batches_with_the_same_requests_are_fitted_together() -> None:
    fit = Fit(5)
    inputs = [(1, 10), (1, 20), (1, 40), (1, 40)]  # the second micro-batch has 40 tokens in both steps
    nbytes = np.array([[10_000, 3000], [20_000, 3000], [40_000, 3000], [40_000, 3000]])
    fit.add([np.array([0, 2]), np.array([1, 3])], nbytes, inputs)
    found = fit.scaling(np.zeros(5, np.int64))
    assert found.terms == ((), (1,)) and found.term.tolist() == [1, 1, CONSTANT, CONSTANT, BOUNDED]
    assert found.factor.tolist() == [1000, 1000, 0, 0, 0]


@pytest.mark.parametrize(("tokens", "terms"), [((10, 20), ((), (1,), (0,), (2,))), ((10, 10), ((),))])
def test_dimensions_that_vary_are_terms_although_no_request_follows(
    tokens: tuple[int, int], terms: tuple[tuple[int, ...], ...]
) -> None:
    fit = Fit(1)
    nbytes = np.array([[1000 * tokens[0]], [1000 * tokens[1]]])
    fit.add([np.array([0])], nbytes, [(5, tokens[0], 7, 3), (8, tokens[1], 9, 3)])
    assert fit.scaling(np.zeros(1, np.int64)).terms == terms


def test_requests_of_no_micro_batch_are_constant_or_bounded() -> None:
    fit = Fit(2)
    fit.add([np.array([0, 1])], np.array([[1000, 1000], [1000, 2000]]), [(), ()])
    assert fit.scaling(np.zeros(2, np.int64)).term.tolist() == [CONSTANT, BOUNDED]


def test_terms_of_dimensions_that_are_not_there_are_zero() -> None:
    assert value_of((), ()) == 1 and value_of((0, 1), (3, 5)) == 15 and value_of((2,), (3, 5)) == 0


def test_input_sizes_are_the_dimensions_of_all_inputs_in_order() -> None:
    of = Fingerprint(inputs=("int64[4, 512], bool[4, 1, 512, 512]", "float32[], int64[7]", ""))
    assert of.input_sizes == ((4, 512, 4, 1, 512, 512), (7,), ())
