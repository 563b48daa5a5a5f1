"""Compares the programs of two training steps (Chameleon, section 4, lightweight mode and Algorithm 1).

Each operator name has a number, so a program is a vector of integers. Chameleon takes the cosine of two such vectors.
memplug takes the cosine of the counts of pairs of neighbouring operators, by quarter of the step:

* One inserted operator shifts all later ones. The vectors then differ at every later position, although the program is
  nearly the same. And a name's number is no magnitude: any two long vectors point in nearly the same direction. Counts
  of pairs change by as much as the program does.
* Pairs alone do not show where a block of operators went. Two forwards before two backwards have nearly the same pairs
  as forward, backward, forward, backward, and need twice the memory. Hence the quarters. A pair counts to the two
  nearest quarters, the nearer one more, so that a small shift after an insertion changes little.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

QUARTERS = 4
EDGE = -1  # stands before the first operator and after the last, so that a single operator forms pairs too


@dataclass(frozen=True, eq=False)
class Program:
    """The program of one training step on one rank.

    Attributes:
        operators: numbers of the operators in the order of the step, int32[operators]. None if they were not watched:
            then steps are compared by the other fields.
        sizes: for each region, the bytes of the inputs of each of its forwards. Another sequence length or batch runs
            the same operators, but is another program for a plan that counts bytes.
        nodes: number of autograd nodes that the step's forwards made; 0 if they are not counted.
        unseen: numbers of the regions that ran as without memplug, so that `sizes` may lack them.
    """

    operators: np.ndarray | None
    sizes: tuple[tuple[int, ...], ...]
    nodes: int = 0
    unseen: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """Convert the operators to little-endian int32, so that fingerprints agree everywhere."""
        if self.operators is not None:
            object.__setattr__(self, "operators", np.asarray(self.operators, dtype="<i4"))

    def same(self, other: Program) -> bool:
        """Return whether both steps ran the same program, as far as is known.

        It takes microseconds, and almost every step is the same as the one before.
        """
        watched = self.operators is not None and other.operators is not None
        return (
            self.nodes == other.nodes
            and self.same_sizes(other)
            and not (watched and not np.array_equal(self.operators, other.operators))
        )

    def same_sizes(self, other: Program) -> bool:
        """Return whether the region forwards that both steps observed had inputs of the same sizes."""
        unseen = self.unseen | other.unseen
        return self.sizes == other.sizes or self.sizes_beside(unseen) == other.sizes_beside(unseen)

    def sizes_beside(self, unseen: frozenset[int]) -> tuple[tuple[int, ...], ...]:
        """Return `sizes` without the regions in `unseen`."""
        if not unseen:
            return self.sizes
        return tuple(own for number, own in enumerate(self.sizes) if number not in unseen)

    def bytes_beside(self, unseen: frozenset[int]) -> int:
        """Return the bytes of the inputs of all region forwards, without the regions in `unseen`."""
        return sum(map(sum, self.sizes_beside(unseen)))

    @cached_property
    def fingerprint(self) -> str:
        """Return the name of the program; the same in every process that numbers operators alike."""
        operators = b"" if self.operators is None else self.operators.tobytes()
        lengths = np.array([len(operators), self.nodes], "<i8").tobytes()
        return hashlib.sha256(lengths + operators + repr(self.sizes).encode()).hexdigest()[:12]

    @cached_property
    def _pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the distinct pairs of neighbours, sorted, and their weight in each quarter, float64[pairs, 4]."""
        padded = np.concatenate(([EDGE], self.operators, [EDGE])).astype(np.int64)
        pairs, which = np.unique((padded[:-1] << 32) + padded[1:], return_inverse=True)
        centres = (np.arange(len(which)) + 0.5) / len(which) * QUARTERS - 0.5  # 0 is the middle of the first quarter
        at = np.clip(centres, 0, QUARTERS - 1)
        before = np.minimum(at.astype(int), QUARTERS - 2)
        cells, size = which * QUARTERS + before, len(pairs) * QUARTERS
        counts = np.bincount(cells, before + 1 - at, size) + np.bincount(cells + 1, at - before, size)
        return pairs, counts.reshape(-1, QUARTERS)


def similar(a: Program, b: Program, length_tolerance: float, cosine_similarity: float) -> bool:
    """Return whether two steps ran programs so similar that the plan of one serves the other.

    Both limits are inclusive. With 0 and 1, hardly any program but the same one is similar.

    Args:
        a: a program.
        b: another program.
        length_tolerance: largest share, in [0, 1], of the longer program by which the two may differ in the number of
            operators, the number of nodes and the bytes of the regions' inputs.
        cosine_similarity: least value of `cosine`, in [0, 1].
    """
    if a.same(b):
        return True
    counted = a.nodes and b.nodes
    if counted and not _near(a.nodes, b.nodes, length_tolerance):
        return False
    unseen = a.unseen | b.unseen
    if not _near(a.bytes_beside(unseen), b.bytes_beside(unseen), length_tolerance):
        return False
    if a.operators is None or b.operators is None:
        return True
    return _near(len(a.operators), len(b.operators), length_tolerance) and cosine(a, b) >= cosine_similarity


def cosine(a: Program, b: Program) -> float:
    """Return the cosine similarity of the counts of pairs, by quarter; in [0, 1], 1 for the same operators."""
    (pairs_a, counts_a), (pairs_b, counts_b) = a._pairs, b._pairs
    _, at_a, at_b = np.intersect1d(pairs_a, pairs_b, assume_unique=True, return_indices=True)
    product = (counts_a[at_a] * counts_b[at_b]).sum()
    return float(product / math.sqrt((counts_a * counts_a).sum() * (counts_b * counts_b).sum()))


def difference(new: Program, old: Program) -> str:
    """Return how a program differs from an earlier one, in words."""
    unseen = new.unseen | old.unseen
    change_bytes = _change(new.bytes_beside(unseen), old.bytes_beside(unseen))
    inputs = f"{sum(map(len, new.sizes_beside(unseen))):,} region inputs ({change_bytes} of bytes)"
    if new.operators is None or old.operators is None:
        return f"{new.nodes:,} nodes ({_change(new.nodes, old.nodes)}), {inputs}" if new.nodes else inputs
    change = _change(len(new.operators), len(old.operators))
    return f"{len(new.operators):,} operators ({change}), cosine similarity {cosine(new, old):.2f}, {inputs}"


def _near(a: int, b: int, tolerance: float) -> bool:
    return abs(a - b) <= tolerance * max(a, b)


def _change(new: int, old: int) -> str:
    return f"{(new - old) / old:+.0%}" if old else "none before"
