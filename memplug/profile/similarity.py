"""Compares the programs of two training steps (Chameleon, section 4, lightweight mode and Algorithm 1).

Each operator name has a number, so a program is a vector of integers. Chameleon takes the cosine of two such vectors.
memplug instead counts the pairs of neighbouring operators in each quarter of the step, and takes the cosine of these
counts:

* One inserted operator shifts all later ones, so the vectors differ at every later position, although the programs are
  nearly the same. The numbers of names are not magnitudes either: any two long vectors of them point in nearly the same
  direction. Counts of pairs change only as much as the program does.
* Counts over the whole step do not show the order of large parts. Two forwards before two backwards have nearly the
  same pairs as forward, backward, forward, backward, but need twice the memory. So pairs are counted by quarter. Each
  pair counts in the two nearest quarters, more in the nearer one, so that a small shift changes little.

A loop over the experts that got tokens runs more often in one step than in another, which makes no other program. So
programs of other lengths are compared once more with their loops folded: each loop's body counts once.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

QUARTERS = 4
EDGE = -1  # added before the first operator and after the last, so that a single operator forms pairs too
LONGEST_BODY = 128  # operators of a loop's body, at most: a loop over layers or micro-batches has more


@dataclass(frozen=True, eq=False)
class Program:
    """The program of one training step on one rank.

    Attributes:
        operators: numbers of the operators in the order of the step, int32[operators]. None if they were not watched;
            then only the other fields are compared.
        sizes: for each region, the bytes of the inputs of each of its forwards. With another sequence length or batch
            the same operators run, but a plan, which counts bytes, does not fit.
        nodes: number of autograd nodes that the step's forwards made; 0 if they are not counted.
        unseen: indices in `sizes` of the regions that ran as without memplug; their sizes may be missing.
    """

    operators: np.ndarray | None
    sizes: tuple[tuple[int, ...], ...]
    nodes: int = 0
    unseen: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """Convert the operators to little-endian int32, so that fingerprints agree on all machines."""
        if self.operators is not None:
            object.__setattr__(self, "operators", np.asarray(self.operators, dtype="<i4"))

    def same(self, other: Program) -> bool:
        """Return whether both steps ran the same program, by those fields that both have.

        This takes microseconds; almost every step runs the same program as the one before.
        """
        watched = self.operators is not None and other.operators is not None
        return (
            self.nodes == other.nodes
            and self.same_sizes(other)
            and not (watched and not np.array_equal(self.operators, other.operators))
        )

    def same_sizes(self, other: Program) -> bool:
        """Return whether the inputs of the regions that both steps observed had the same sizes."""
        unseen = self.unseen | other.unseen
        return self.sizes == other.sizes or self.sizes_beside(unseen) == other.sizes_beside(unseen)

    def sizes_beside(self, unseen: frozenset[int]) -> tuple[tuple[int, ...], ...]:
        """Return `sizes` without the regions in `unseen`."""
        if not unseen:
            return self.sizes
        return tuple(own for number, own in enumerate(self.sizes) if number not in unseen)

    def bytes_beside(self, unseen: frozenset[int]) -> int:
        """Return the total bytes in `sizes`, without the regions in `unseen`."""
        return sum(map(sum, self.sizes_beside(unseen)))

    @property
    def size(self) -> int:
        """Return the bytes of the regions' inputs, as if all forwards of a region had the largest one's."""
        return sum(len(forwards) * max(forwards, default=0) for forwards in self.sizes)

    def over(self, other: Program) -> float | None:
        """Return this step's size over another's; None if no region shows it.

        Regions that one of both did not observe do not count.
        """
        unseen = self.unseen | other.unseen
        own, others = (replace(each, sizes=each.sizes_beside(unseen)).size for each in (self, other))
        return own / others if own and others else None

    @cached_property
    def is_mixed(self) -> bool:
        """Return whether the step has forwards of several sizes, so that its first one does not tell its size."""
        return any(len(set(forwards)) > 1 for forwards in self.sizes)

    @cached_property
    def fingerprint(self) -> str:
        """Return the program's fingerprint: the same in all processes in which operators have the same numbers."""
        operators = b"" if self.operators is None else self.operators.tobytes()
        lengths = np.array([len(operators), self.nodes], "<i8").tobytes()
        return hashlib.sha256(lengths + operators + repr(self.sizes).encode()).hexdigest()[:12]

    @cached_property
    def folded(self) -> Program:
        """Return the program with the body of each loop once, however often it ran."""
        return replace(self, operators=_folded(self.operators))

    @cached_property
    def _pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the distinct pairs of neighbouring operators (sorted), and their counts, float64[pairs, quarters]."""
        padded = np.concatenate(([EDGE], self.operators, [EDGE])).astype(np.int64)
        pairs, which = np.unique((padded[:-1] << 32) + padded[1:], return_inverse=True)
        centres = (np.arange(len(which)) + 0.5) / len(which) * QUARTERS - 0.5  # 0 is the middle of the first quarter
        at = np.clip(centres, 0, QUARTERS - 1)
        before = np.minimum(at.astype(int), QUARTERS - 2)
        cells, size = which * QUARTERS + before, len(pairs) * QUARTERS
        counts = np.bincount(cells, before + 1 - at, size) + np.bincount(cells + 1, at - before, size)
        return pairs, counts.reshape(-1, QUARTERS)


def similar(a: Program, b: Program, length_tolerance: float, cosine_similarity: float) -> bool:
    """Return whether two programs are so similar that the plan of one serves the other.

    Programs with other numbers of operators and nodes may still be similar with their loops folded.

    Both limits are inclusive. With the limits 0 and 1, hardly any program except the same one is similar.

    Args:
        a: a program.
        b: another program.
        length_tolerance: the largest relative difference, in [0, 1], in the number of operators, the number of nodes
            and the bytes of the regions' inputs; relative to the larger value.
        cosine_similarity: the least value of `cosine`, in [0, 1].
    """
    if a.same(b):
        return True
    unseen = a.unseen | b.unseen
    near = _near(a.bytes_beside(unseen), b.bytes_beside(unseen), length_tolerance)
    return near and related(a, b, length_tolerance, cosine_similarity)


def related(a: Program, b: Program, length_tolerance: float, cosine_similarity: float) -> bool:
    """Return whether two programs differ at most in the sizes of their inputs: the same operators, as often.

    Args:
        a: a program.
        b: another program.
        length_tolerance: the largest relative difference in the numbers of operators, nodes and region inputs.
        cosine_similarity: see `similar`.
    """
    if a.same(b):
        return True
    unseen = a.unseen | b.unseen
    forwards = [sum(map(len, program.sizes_beside(unseen))) for program in (a, b)]
    if not _near(*forwards, length_tolerance):
        return False
    alike = not (a.nodes and b.nodes) or _near(a.nodes, b.nodes, length_tolerance)
    if a.operators is None or b.operators is None:
        return alike
    if alike and _near_operators(a, b, length_tolerance, cosine_similarity):
        return True
    # with as many operators but in another order, a program may need other memory
    return len(a.operators) != len(b.operators) and _near_operators(
        a.folded, b.folded, length_tolerance, cosine_similarity
    )


def _near_operators(a: Program, b: Program, length_tolerance: float, cosine_similarity: float) -> bool:
    if np.array_equal(a.operators, b.operators):
        return True
    return _near(len(a.operators), len(b.operators), length_tolerance) and cosine(a, b) >= cosine_similarity


def cosine(a: Program, b: Program) -> float:
    """Return the cosine similarity of two programs' counts of pairs by quarter: in [0, 1], 1 for the same operators."""
    (pairs_a, counts_a), (pairs_b, counts_b) = a._pairs, b._pairs
    _, at_a, at_b = np.intersect1d(pairs_a, pairs_b, assume_unique=True, return_indices=True)
    product = (counts_a[at_a] * counts_b[at_b]).sum()
    return float(product / math.sqrt((counts_a * counts_a).sum() * (counts_b * counts_b).sum()))


def _folded(operators: np.ndarray) -> np.ndarray:
    """Return the operators without repetitions: of equal runs that follow each other only the first stays."""
    for length in range(1, LONGEST_BODY + 1):
        repeats = operators[length:] == operators[:-length]
        edges = np.flatnonzero(np.diff(repeats, prepend=False, append=False))
        begins, ends = edges[::2], edges[1::2]
        left_out = np.zeros(len(operators), bool)
        last = 0
        for begin, end in zip(begins[long := ends - begins >= length].tolist(), ends[long].tolist(), strict=True):
            begin = max(begin, last)
            last = max(last, begin + length + (end - begin) // length * length)
            left_out[begin + length : last] = True
        operators = operators[~left_out]
    return operators


def difference(new: Program, old: Program) -> str:
    """Return a text on how a program differs from an earlier one."""
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
