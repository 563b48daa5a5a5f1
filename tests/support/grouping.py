"""Measures how much the times of operator groups vary, and how wrong Eq. 1 is (Chameleon, section 5.1, Fig. 4)."""

from __future__ import annotations

import numpy as np

from tests.support.logical_layers import group_edges


def group_variation(operator_s: np.ndarray, groups: int) -> float:
    """Return how far the times of groups spread: their coefficient of variation, the solid line of Fig. 4.

    Args:
        operator_s: Measured seconds of each operator of one forward or backward, in execution order; float[operators].
        groups: As in `group_edges`.

    Returns:
        Standard deviation over mean of the groups' seconds.

    Raises:
        ValueError: `groups` is below 1, or the operators take no time at all.
    """
    times = _group_s(operator_s, groups)
    return float(times.std() / times.mean())


def estimate_error(operator_s: np.ndarray, groups: int, seconds_per_operator: float | None = None) -> float:
    """Return how far Eq. 1 is from the measured times of groups: the mean relative error, the dashed line of Fig. 4.

    Args:
        operator_s: As in `group_variation`.
        groups: As in `group_edges`.
        seconds_per_operator: Mean over the whole step, T_iter / N_iter; by default the mean of these operators.

    Returns:
        Mean over the groups of |estimated - measured| / measured; infinite where a group took no time.

    Raises:
        ValueError: As in `group_variation`.
    """
    times = _group_s(operator_s, groups)
    rate = times.sum() / len(operator_s) if seconds_per_operator is None else seconds_per_operator
    estimates = rate * np.diff(group_edges(len(operator_s), groups))
    with np.errstate(divide="ignore"):
        return float(np.mean(np.abs(estimates - times) / times))


def _group_s(operator_s: np.ndarray, groups: int) -> np.ndarray:
    edges = group_edges(len(operator_s), groups)
    total = np.sum(operator_s)
    if not total > 0:
        raise ValueError(f"the operators must take time, got {total} s in all")
    return np.add.reduceat(operator_s, edges[:-1])
