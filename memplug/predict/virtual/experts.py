"""Spreads tokens evenly over experts on the virtual device, as a balanced router does.

A router's choice depends on values, which the virtual device does not have. Only this file makes an assumption about
that choice:

    with evenly(chosen=2, experts=8):
        train()

From a rank with `tokens` tokens, each expert then gets `tokens * chosen / experts`. Megatron-Core's all-to-all
dispatcher gets these numbers instead of the counts that it reads from the device. Operators that choose by a mask treat
the fraction `chosen / experts` of the mask as true.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from memplug.predict.virtual import VirtualDevice
from memplug.predict.virtual.replacing import replaced

DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"


@contextlib.contextmanager
def evenly(chosen: int, experts: int) -> Iterator[None]:
    """Spread tokens evenly over experts inside the context.

    If Megatron-Core trains, import it before entering the context. The virtual device must exist.

    Args:
        chosen: The number of experts that each token goes to.
        experts: The number of all experts.
    """
    device, dispatchers = VirtualDevice.current(), sys.modules.get(DISPATCHER)
    device.assume_true(chosen / experts)
    try:
        with contextlib.ExitStack() as stack:
            if dispatchers is not None:
                owner = dispatchers.MoEAlltoAllTokenDispatcher
                stack.enter_context(replaced(owner, "preprocess", _counted(owner.preprocess), "megatron-core 0.16"))
            yield
    finally:
        device.assume_true(1.0)


def _counted(preprocess: Any) -> Any:
    """Wrap the dispatcher's `preprocess` so that it counts tokens as spread evenly over experts.

    `preprocess` still runs, because its operators are part of the step.
    """

    def run(self: Any, routing_map: torch.Tensor) -> torch.Tensor:
        counts = preprocess(self, routing_map)
        if self.drop_and_pad:
            return counts  # each expert gets as many tokens as its capacity
        given = _shared(routing_map.shape[0] * self.config.moe_router_topk, self.num_experts)
        mine = given[self.local_expert_indices[0] : self.local_expert_indices[-1] + 1]
        ranks = self.ep_size * self.tp_size
        if ranks > 1:
            self.input_splits = given.view(self.ep_size, -1).sum(1).numpy()
            self.output_splits = mine.sum().expand(self.ep_size).numpy()
            self.output_splits_tp = (mine.sum() * self.ep_size).expand(self.tp_size).numpy()
        if self.num_local_experts > 1:
            self.num_global_tokens_per_local_expert = mine.expand(ranks, -1).contiguous()
        return mine * ranks

    return run


def _shared(tokens: int, experts: int) -> torch.Tensor:
    """Return each expert's number of tokens; if the division leaves a remainder, the first experts get one more.

    Args:
        tokens: The number of all tokens, each counted once for each of its experts.
        experts: The number of experts.

    Returns:
        int64[experts], on the CPU.
    """
    counts = torch.full((experts,), tokens // experts, dtype=torch.long, device="cpu")
    counts[: tokens % experts] += 1
    return counts
