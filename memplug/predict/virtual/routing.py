"""Draws how many tokens each expert of a mixture gets, since the virtual device has no values to route by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplug.errors import EstimateError

KINDS = ("even", "uniform", "zipf")
_ROWS = 1 << 16  # tokens that draw their experts at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """How a router spreads tokens over experts.

    Attributes:
        kind: "even": each expert gets as many tokens as any other, in every step. "uniform": each token draws its
            experts anew in each step, all equally likely. "zipf": likewise, where expert i is drawn with a probability
            in proportion to (i + 1) ** -exponent. The most likely experts come first in every layer, so of expert
            parallel ranks the first one gets most tokens.
        exponent: The exponent of "zipf", above 0; otherwise 0.
    """

    kind: str = "even"
    exponent: float = 0.0

    @classmethod
    def of(cls, words: str) -> Routing:
        """Return the routing that is named "even", "uniform", "zipf" (with exponent 1) or, for example, "zipf:0.5".

        Raises:
            EstimateError: There is no such routing.
        """
        kind, _, exponent = words.partition(":")
        try:
            value = float(exponent) if exponent else float(kind == "zipf")
        except ValueError:
            value = -1.0
        if kind not in KINDS or (kind == "zipf") != (0 < value < float("inf")) or words.endswith(":"):
            raise EstimateError(
                f"there is no routing {words!r}", 'Choose even, uniform, zipf or, with an exponent above 0, "zipf:0.5".'
            )
        return cls(kind=kind, exponent=value)

    def __str__(self) -> str:
        """Return the routing's name, as `of` reads it."""
        return f"{self.kind}:{self.exponent:g}" if self.kind == "zipf" else self.kind


class Draws:
    """Draws numbers of tokens; draws of equal routings come in the same order.

    Args:
        routing: How tokens spread over experts.
    """

    def __init__(self, routing: Routing):
        self._routing, self._random = routing, np.random.default_rng(0)

    def counts(self, tokens: int, chosen: int, experts: int) -> np.ndarray:
        """Return each expert's number of tokens.

        Args:
            tokens: The number of tokens.
            chosen: The number of different experts that each token goes to.
            experts: The number of experts.

        Returns:
            int64[experts]; their sum is `tokens` times `chosen`.
        """
        if self._routing.kind == "even":
            counts = np.full(experts, tokens * chosen // experts, np.int64)
            counts[: tokens * chosen % experts] += 1
            return counts
        counts = np.zeros(experts, np.int64)
        likely = -self._routing.exponent * np.log(np.arange(1, experts + 1, dtype=np.float32))
        for begin in range(0, tokens, _ROWS):
            # The largest of log-probabilities with Gumbel noise are draws without replacement.
            rows = min(_ROWS, tokens - begin)
            keys = likely - np.log(self._random.standard_exponential((rows, experts), np.float32))
            first = np.argpartition(keys, experts - chosen, axis=1)[:, experts - chosen :]
            counts += np.bincount(first.ravel(), minlength=experts)
        return counts

    def around(self, recorded: np.ndarray, tokens: int) -> np.ndarray:
        """Return each expert's number of tokens if each token draws its experts anew, as likely as they were recorded.

        The routing's kind does not matter.

        Args:
            recorded: Each expert's number of tokens in a recorded step, int64[experts], at most `tokens`.
            tokens: The number of tokens; each goes to as many different experts as in the recorded step.

        Returns:
            int64[experts], with the same sum as `recorded`.
        """
        chosen, order = int(recorded.sum()) // tokens, self._random.permutation(len(recorded))
        # Systematic sampling: on a line of experts, each as long as its tokens, a token marks places `tokens` apart.
        ends = np.cumsum(recorded[order])
        counts = np.zeros(len(recorded), np.int64)
        for begin in range(0, tokens, _ROWS):
            marks = self._random.integers(tokens, size=(min(_ROWS, tokens - begin), 1)) + tokens * np.arange(chosen)
            counts[order] += np.bincount(np.searchsorted(ends, marks, "right").ravel(), minlength=len(recorded))
        return counts
