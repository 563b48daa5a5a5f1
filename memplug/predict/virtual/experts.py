"""Spreads tokens over experts on the virtual device, as a router does.

A router's choice depends on values, which the virtual device does not have. A `Routing` says what is assumed about that
choice:

    with routed(Routing(kind="uniform"), chosen=2, experts=8):
        train()

Megatron-Core's all-to-all dispatcher gets drawn numbers of tokens instead of the counts that it reads from the device.
Operators that choose by a mask treat the fraction `chosen / experts` of the mask as true.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from memplug.predict.virtual import VirtualDevice
from memplug.predict.virtual.replacing import replaced
from memplug.predict.virtual.routing import Draws, Routing
from memplug.torch_private import current_graph_task_id

DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"


@contextlib.contextmanager
def routed(routing: Routing, chosen: int, experts: int, micro_batches: int = 1) -> Iterator[None]:
    """Spread tokens over experts inside the context.

    If Megatron-Core trains, import it before entering the context. The virtual device must exist.

    Args:
        routing: How tokens spread over experts.
        chosen: The number of experts that each token goes to.
        experts: The number of all experts.
        micro_batches: The number of micro-batches of a step; backwards run in the order of their forwards.
    """
    device, dispatchers = VirtualDevice.current(), sys.modules.get(DISPATCHER)
    device.assume_true(chosen / experts)
    try:
        with contextlib.ExitStack() as stack:
            if dispatchers is not None:
                owner = dispatchers.MoEAlltoAllTokenDispatcher
                run = _counted(owner.preprocess, Draws(routing), micro_batches)
                stack.enter_context(replaced(owner, "preprocess", run, "megatron-core 0.16"))
            yield
    finally:
        device.assume_true(1.0)


@dataclass(slots=True)
class _Drawn:
    """The draws of one dispatcher in one step.

    Attributes:
        forwards: Forwards in this step.
        waiting: The draws of forwards that no recompute pass has repeated, in order.
    """

    forwards: int = 0
    waiting: deque[np.ndarray] = field(default_factory=deque)


def _counted(preprocess: Any, draws: Draws, micro_batches: int) -> Any:
    """Wrap the dispatcher's `preprocess` so that it counts tokens as they are drawn.

    `preprocess` still runs, because its operators are part of the step. A recompute pass gets its forward's counts.
    """
    of_dispatcher: WeakKeyDictionary[Any, _Drawn] = WeakKeyDictionary()

    def sent(dispatcher: Any, tokens: int) -> np.ndarray:
        """Return the tokens that each rank sends to each expert, int64[tensor, expert parallel ranks, experts]."""
        drawn = of_dispatcher.setdefault(dispatcher, _Drawn())
        if current_graph_task_id() != -1:
            return drawn.waiting.popleft()
        if drawn.forwards == micro_batches:
            drawn.forwards = 0
            drawn.waiting.clear()
        drawn.forwards += 1
        ranks, experts = dispatcher.tp_size * dispatcher.ep_size, dispatcher.num_experts
        counts = np.stack([draws.counts(tokens, dispatcher.config.moe_router_topk, experts) for _ in range(ranks)])
        drawn.waiting.append(counts.reshape(dispatcher.tp_size, dispatcher.ep_size, experts))
        return drawn.waiting[-1]

    def run(self: Any, routing_map: torch.Tensor) -> torch.Tensor:
        counts = preprocess(self, routing_map)
        if self.drop_and_pad:
            return counts  # each expert gets as many tokens as its capacity
        given = sent(self, routing_map.shape[0])
        mine = given[..., self.local_expert_indices[0] : self.local_expert_indices[-1] + 1]
        if self.ep_size * self.tp_size > 1:
            own = given[self.tp_rank, self.local_expert_indices[0] // self.num_local_experts]
            self.input_splits = own.reshape(self.ep_size, -1).sum(1)
            self.output_splits = mine[self.tp_rank].sum(1)
            self.output_splits_tp = mine.sum((1, 2))
        if self.num_local_experts > 1:
            self.num_global_tokens_per_local_expert = _on_cpu(mine.reshape(-1, self.num_local_experts))
        return _on_cpu(mine.sum((0, 1)))

    return run


def _on_cpu(counts: np.ndarray) -> torch.Tensor:
    return torch.tensor(counts, dtype=torch.long, device="cpu")
