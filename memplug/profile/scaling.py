"""Finds how the bytes of a step's requests follow from the sizes of its inputs.

A program that runs on batches of several lengths makes the same requests in each step, with other sizes: most have a
size that does not change, or one in proportion to a product of the inputs' dimensions, such as batch × length. Two
steps with other inputs show which; three tell a constant part beside the product.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memplug.sizes import BLOCK_BYTES, rounded_up

CONSTANT, BOUNDED = 0, -1
"""Values of `Scaling.term`: the size never changes; it changes in an unknown way, up to the largest that was seen."""

MOST_DIMENSIONS, MOST_FACTORS = 3, 3
"""So many dimensions may vary independently, and a term has at most so many factors."""

Inputs = tuple[tuple[int, ...], ...]
"""The sizes of all dimensions of a step's inputs, for each micro-batch (`Fingerprint.input_sizes`)."""

Term = tuple[int, ...]
"""A product: numbers of dimensions in a micro-batch's inputs, each as often as it is a factor; none: 1."""


@dataclass(frozen=True, eq=False)
class Scaling:
    """The sizes of n requests as functions of the inputs: `base + factor * term`.

    Attributes:
        terms: the terms; the first has no factors. If requests follow from the inputs, each dimension that varied is in
            one, although perhaps no request follows from it.
        term: index into `terms` of each request; CONSTANT or BOUNDED where the size is no such function. int64[n].
        base, factor: bytes; 0 where the size is no such function. int64[n].
        largest: the most bytes that each request had in any of the steps, int64[n].
    """

    terms: tuple[Term, ...]
    term: np.ndarray
    base: np.ndarray
    factor: np.ndarray
    largest: np.ndarray


def value_of(term: Term, sizes: Sequence[int]) -> int:
    """Return the value of a term for a micro-batch's input sizes; 0 if it has fewer dimensions."""
    product = 1
    for dimension in term:
        product *= sizes[dimension] if dimension < len(sizes) else 0
    return product


class Fit:
    """Finds the functions of n requests; BOUNDED until `add` finds another one.

    Args:
        count: number of requests.
    """

    def __init__(self, count: int):
        self._terms: dict[Term, int] = {(): CONSTANT}
        self._term, self._base, self._factor = np.full(count, BOUNDED), *np.zeros((2, count), np.int64)
        self._varied: set[int] = set()  # dimensions

    def add(self, rows: Sequence[np.ndarray], nbytes: np.ndarray, inputs: Sequence[Sequence[int]]) -> None:
        """Fit the bytes of k requests, which several micro-batches may make alike.

        Args:
            rows: the numbers of these requests, int64[k] for each micro-batch.
            nbytes: their bytes in several samples, each of one step and micro-batch; int64[samples, k].
            inputs: the input sizes of each sample, with as many dimensions.
        """
        blocks, sizes = rounded_up(nbytes, BLOCK_BYTES), np.array(inputs, np.int64)
        self._varied |= set(np.flatnonzero((sizes != sizes[:1]).any(axis=0)).tolist())
        term, base, factor = np.full(nbytes.shape[1], BOUNDED), *np.zeros((2, nbytes.shape[1]), np.int64)
        term[(nbytes == nbytes[0]).all(axis=0)] = CONSTANT
        for found, values in _terms(sizes):
            left = np.flatnonzero(term == BOUNDED)
            fit = _fit(nbytes[:, left], values)
            fits = fit[1] > 0
            if fits.any():
                term[left[fits]] = self._terms.setdefault(found, len(self._terms))
                base[left[fits]], factor[left[fits]] = fit[:, fits]
        term[(term == BOUNDED) & (blocks == blocks[0]).all(axis=0)] = CONSTANT
        for of_it in rows:
            self._term[of_it], self._base[of_it], self._factor[of_it] = term, base, factor

    def scaling(self, largest: np.ndarray) -> Scaling:
        """Return all functions that were found.

        Args:
            largest: the most bytes of each request in any step, int64[n].
        """
        known = {dimension for term in self._terms for dimension in term}
        others = [(dimension,) for dimension in sorted(self._varied - known)] if known else []
        return Scaling((*self._terms, *others), self._term, self._base, self._factor, largest)


def _terms(sizes: np.ndarray) -> list[tuple[Term, np.ndarray]]:
    """Return the terms of those dimensions that vary, simple ones first, and their values in each sample.

    Args:
        sizes: int64[samples, dimensions]; of dimensions that vary alike, the first counts.
    """
    columns: dict[tuple[int, ...], int] = {}
    for dimension, column in enumerate(map(tuple, sizes.T.tolist())):
        if len(set(column)) > 1:
            columns.setdefault(column, dimension)
    varying = list(columns.values())[:MOST_DIMENSIONS]
    terms = [
        term
        for factors in range(1, MOST_FACTORS + 1)
        for term in itertools.combinations_with_replacement(varying, factors)
    ]
    return [(term, np.array([value_of(term, step) for step in sizes.tolist()], np.int64)) for term in terms]


def _fit(nbytes: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return `base` and `factor` of those requests whose bytes a term gives; factor 0 for others. int64[2, n].

    Two values of the term show no more than a proportion, since any two sizes have a base and a factor.
    """
    first, last = int(values.argmin()), int(values.argmax())
    span = max(1, int(values[last] - values[first]))
    factor = (nbytes[last] - nbytes[first]) // span
    base = nbytes[first] - factor * values[first]
    fits = (nbytes == base + factor * values[:, None]).all(axis=0) & (factor > 0) & (base >= 0)
    fits &= (base == 0) | (len(np.unique(values)) > 2)
    return np.where(fits, [base, factor], 0)
