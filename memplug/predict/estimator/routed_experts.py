"""Answers the reads of experts that run in a loop, as Hugging Face's do, from drawn numbers of tokens.

Such a loop asks which experts got tokens (`nonzero` of a vector), and for each of them which tokens these are
(`nonzero` of a matrix). Experts that run as grouped matmuls ask nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from memplug.errors import EstimateError
from memplug.predict.estimator.values import NUMBER
from memplug.predict.virtual.routing import Draws, Routing
from memplug.torch_private import current_graph_task_id

NONZERO = "aten::nonzero"


class RoutedExperts:
    """Answers the reads of a model's experts, module by module, inside of `watching`.

    Each forward draws numbers of tokens. A recompute pass gets those of the last forward of its module, since backward
    follows each forward here.

    Args:
        routing: How tokens spread over experts.
    """

    def __init__(self, routing: Routing):
        self._draws = Draws(routing)
        self._drawn: dict[nn.Module, np.ndarray] = {}
        self._counts: np.ndarray | None = None  # of the experts that run now
        self._left: Iterator[int] = iter(())  # the numbers of tokens of those experts that the loop has yet to reach

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Watch the model's experts: modules with `num_experts` that are called `experts`.

        Raises:
            EstimateError: The model has none.
        """
        found = [
            module
            for path, module in model.named_modules()
            if path.split(".")[-1] == "experts" and isinstance(getattr(module, "num_experts", None), int)
        ]
        if not found:
            raise EstimateError(
                f"{type(model).__name__} has no experts that a routing could spread tokens over",
                "Leave out the routing, or estimate a mixture whose experts are those of Hugging Face.",
                code="MP028",
            )
        with contextlib.ExitStack() as stack:
            for module in found:
                stack.callback(module.register_forward_pre_hook(self._begin).remove)
                stack.callback(module.register_forward_hook(self._end, always_call=True).remove)
            stack.callback(self._drawn.clear)
            yield

    def answer(self, work: Any) -> list[torch.Tensor] | None:
        """Return the answer to a read of the experts that run now; None if it is none of theirs."""
        if self._counts is None:
            return None
        read = work.inputs[0]
        if work.name == NONZERO and len(read.sizes) == 1:
            hit = np.flatnonzero(self._counts)
            self._left = iter(self._counts[hit].tolist())
            return [torch.tensor(hit, device="cpu")[:, None]]
        if work.name == NONZERO:
            return [torch.empty((next(self._left), len(read.sizes)), dtype=torch.long, device="meta")]
        if work.name == NUMBER:  # an expert's number, or whether it is beyond the last; all experts have equal weights
            return [torch.tensor(0, device="cpu")]
        return None

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if len(args) < 2 or args[1].dim() != 2:
            raise EstimateError(
                f"{type(module).__name__} does not get its tokens' experts as its second argument: no routing fits it",
                "Leave out the routing, and record the values of a real step (`memplug.record_values`).",
                code="MP028",
            )
        tokens, chosen = args[1].shape
        if current_graph_task_id() == -1:
            self._drawn[module] = self._draws.counts(tokens, chosen, module.num_experts)
        self._counts = self._drawn[module]
        self._left = iter(self._counts.tolist())

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._counts = None
