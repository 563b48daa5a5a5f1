"""Reads the shapes and dtypes of a step's inputs, given as in "int64[4, 512], float32[]"."""

from __future__ import annotations

import re
from math import prod


def kind(inputs: str) -> str:
    """Return inputs without the sizes of their dimensions."""
    return re.sub(r"\d+(?=[,\]])", "_", inputs)


def growth_of(inputs: str, known: str) -> float | None:
    """Return how much larger a step probably is than one with known inputs; None if the inputs are of other kinds.

    The step grows as the number of elements does that changes most, or shrinks as the one that changes least.

    Args:
        inputs: of the step.
        known: of another step.
    """
    counts = _counts(known)
    if kind(inputs) != kind(known) or not all(counts):
        return None
    changes = [new / old for new, old in zip(_counts(inputs), counts, strict=True) if new != old]
    return max(changes, default=1.0)


def elements(inputs: str) -> int:
    """Return the number of elements of inputs, described as in "int64[4, 512], float32[]"."""
    return sum(_counts(inputs))


def _counts(inputs: str) -> list[int]:
    """Return the number of elements of each tensor among inputs."""
    shapes = re.findall(r"\[([^]]*)\]", inputs)
    return [prod(int(size) for size in shape.split(",") if size.strip()) for shape in shapes]
