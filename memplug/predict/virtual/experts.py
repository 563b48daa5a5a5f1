"""Mixtures of experts on the virtual device: tokens are spread evenly over experts, as a balanced router would.

What a router chooses depends on data, of which there is none. This is the one place where that is assumed:

    with evenly(chosen=2, experts=8):
        train()

An expert then gets `tokens * chosen / experts` of the tokens of every rank. Megatron-Core's all-to-all dispatcher is
told so where it asks the device for the numbers; elsewhere, what chooses by a mask finds that share of it true.
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
    """Within, of `experts` each token goes to `chosen`, and all get as many.

    Megatron-Core is imported already, if it is what trains.
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
    """Megatron-Core's count of tokens by expert runs on the device; the numbers are these, on the host."""

    def run(self: Any, routing_map: torch.Tensor) -> torch.Tensor:
        counts = preprocess(self, routing_map)
        if self.drop_and_pad:
            return counts  # as many for each as its capacity
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
    """How many each expert gets, the first ones one more where it does not come out even: int64, on the CPU."""
    counts = torch.full((experts,), tokens // experts, dtype=torch.long, device="cpu")
    counts[: tokens % experts] += 1
    return counts
