"""Answers the reads of experts that run in a loop, as Hugging Face's do, from drawn numbers of tokens.

Such a loop asks which experts got tokens (`nonzero` of a vector), and for each of them which tokens these are
(`nonzero` of a matrix). Experts that run as grouped matmuls ask nothing. Each expert's chance of a token is assumed, or
that of a trace of values.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from memplug.errors import EstimateError
from memplug.predict.estimator.values import NUMBER, Values, modules_of
from memplug.predict.virtual.routing import Draws, Routing
from memplug.torch_private import current_graph_task_id

NONZERO = "aten::nonzero"
RECORD_ANEW = (
    "Record the step again (`memplug.record_values`), with the same model and code, sequence length and micro-batch "
    "as the estimate."
)


def recorded_counts(values: Values) -> dict[str, np.ndarray]:
    """Return the numbers of tokens that experts got in a trace, by path of the modules that read as such a loop does.

    Modules whose calls read different values are left out, and those that drop tokens.

    Args:
        values: The trace.

    Returns:
        int64[experts that got tokens], in the order in which they ran.
    """
    found = {}
    for path, calls in values.calls.items():
        reads = [read for read in calls[0] if read.operator == NONZERO]
        if path.split(".")[-1] != "experts" or len(calls) > 1 or len(reads) < 2:
            continue
        counts = [read.outputs[0].sizes[0] for read in reads]
        masks = {read.inputs[0] for read in reads[1:]}
        is_loop = len(reads[0].inputs[0]) == 1 and counts[0] == len(counts) - 1
        if is_loop and {math.prod(mask) for mask in masks if len(mask) == 2} == {sum(counts[1:])}:
            found[path] = np.array(counts[1:], np.int64)
    return found


class RoutedExperts:
    """Answers the reads of a model's experts, module by module, inside of `watching`.

    Each forward draws numbers of tokens. A recompute pass gets those of the last forward of its module, since backward
    follows each forward here.

    Args:
        routing: How tokens spread over experts.
        recorded: The numbers of tokens that experts got in a trace, see `recorded_counts`. Experts of these modules are
            as likely as in the trace, whatever `routing` is, and no others are watched. None: there is no trace.
    """

    def __init__(self, routing: Routing, recorded: Mapping[str, np.ndarray] | None = None):
        self._draws = Draws(routing)
        self._recorded = recorded
        self._path_of: dict[nn.Module, str] = {}  # of the modules in the trace
        self._drawn: dict[nn.Module, np.ndarray] = {}
        self._counts: np.ndarray | None = None  # of the experts that run now
        self._left: Iterator[int] = iter(())  # the numbers of tokens of those experts that the loop has yet to reach

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Watch the model's experts: modules with `num_experts` that are called `experts`.

        Raises:
            EstimateError: The model has none, and there is no trace.
        """
        found = {
            path: module
            for path, module in modules_of(model).items()
            if path.split(".")[-1] == "experts" and isinstance(getattr(module, "num_experts", None), int)
        }
        if self._recorded is not None:
            found = {path: module for path, module in found.items() if path in self._recorded}
            self._path_of = {module: path for path, module in found.items()}
        elif not found:
            raise EstimateError(
                f"{type(model).__name__} has no experts that a routing could spread tokens over",
                "Leave out the routing, or estimate a mixture whose experts are those of Hugging Face.",
                code="MP028",
            )
        with contextlib.ExitStack() as stack:
            for module in found.values():
                stack.callback(module.register_forward_pre_hook(self._begin).remove)
                stack.callback(module.register_forward_hook(self._end, always_call=True).remove)
            stack.callback(self._drawn.clear)
            stack.callback(self._path_of.clear)
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
            self._drawn[module] = self._draw(module, tokens, chosen)
        self._counts = self._drawn[module]
        self._left = iter(self._counts.tolist())

    def _draw(self, module: nn.Module, tokens: int, chosen: int) -> np.ndarray:
        if self._recorded is None:
            return self._draws.counts(tokens, chosen, module.num_experts)
        recorded = self._recorded[self._path_of[module]]
        if recorded.sum() != tokens * chosen or recorded.max() > tokens or len(recorded) > module.num_experts:
            raise EstimateError(
                f"module {self._path_of[module]} sends {tokens} tokens to {chosen} of {module.num_experts} experts "
                f"each, but in the trace of values its experts got {recorded.tolist()}",
                RECORD_ANEW,
                code="MP028",
            )
        return self._draws.around(recorded, tokens)

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._counts = None
