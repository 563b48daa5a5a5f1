"""Makes rows of a summary: shares of memory by holder (phase or layer), and values of two plans side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from memplug.figures.groups import OUTSIDE, phase_words
from memplug.profile.records import Layer, Phase
from memplug.words import known, size

Rows = list[tuple[str, str]]
"""(name, value) pairs, in words."""

AT_MOST = 8
"""Largest number of rows of one kind."""


class RequestTables(Protocol):
    """The tables of phases and layers to which requests refer by index."""

    @property
    def phases(self) -> Sequence[Phase]:
        """Return the phases, by index."""

    @property
    def layers(self) -> Sequence[Layer]:
        """Return the layers, by index."""


def bytes_by(column: str, tables: RequestTables, of: np.ndarray, nbytes: np.ndarray) -> Counter[str]:
    """Return the sum of bytes for each phase or layer, by its name.

    Args:
        column: "phase" or "layer".
        tables: The phases and layers.
        of: Index of each request's phase or layer; -1: outside of layers.
        nbytes: Bytes of each request.
    """
    names = [phase_words(phase) for phase in tables.phases] if column == "phase" else [x.name for x in tables.layers]
    held: Counter[str] = Counter()
    for index in np.unique(of):
        held[names[index] if index >= 0 else OUTSIDE] += int(nbytes[of == index].sum())
    return held


def held_rows(name: str, held: dict[str, int], peak_bytes: int) -> list[tuple[str, str]]:
    """Return the bytes of each holder and their share of the peak, as rows under one name.

    There are at most AT_MOST rows: the last one may sum up all further holders.
    """
    shown = list(held.items())
    if len(shown) > AT_MOST:
        others = [nbytes for _, nbytes in shown[AT_MOST - 1 :]]
        shown[AT_MOST - 1 :] = [(f"{len(others)} others, at most {size(max(others))} each", sum(others))]
    width = max((len(size(nbytes)) for _, nbytes in shown), default=0)
    return [
        (name if i == 0 else "", f"{size(nbytes):>{width}}  {nbytes / max(peak_bytes, 1):>4.0%}  {what}")
        for i, (what, nbytes) in enumerate(shown)
    ]


def both(a: str, b: str) -> str:
    """Return the values of A and B in words, or a single value if they are the same."""
    return f"{a} in both" if a == b else f"{a} in A, {b} in B"


def change(a: float | None, b: float | None, words: Callable[[Any], str]) -> str:
    """Return two amounts and their difference in words.

    Args:
        a: A's amount; None: unknown.
        b: B's amount; None: unknown.
        words: Puts an amount into words, for example `size`.
    """
    if a is None or b is None or a == b:
        return both(known(a, words), known(b, words))
    share = f", {(b - a) / a:+.2%}" if a else ""
    return f"{words(a)} in A, {words(b)} in B: {words(abs(b - a))} {'more' if b > a else 'less'}{share}"
