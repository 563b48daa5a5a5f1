"""A tiny Llama that trains on the device with and without memplug, and its results."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import memplug

ALONE = {"profiler": {"enabled": False}, "arena": {"enabled": False}}


def block(alpha: float | str = "auto", **parts: Any) -> dict[str, Any]:
    """Return a block that swaps even the smallest tensor."""
    swapping = {"tokenwise": {"alpha": alpha, "min_offload_bytes": 1}}
    return {"enabled": True, "plan_dir": False, **swapping, **parts}


def model(dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> LlamaForCausalLM:
    """Return a model of four layers with grouped queries; each call returns the same weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
        attention_dropout=dropout,
    )
    return LlamaForCausalLM(config).cuda().to(dtype).train()


@dataclass(frozen=True)
class Case:
    """A configuration of the training."""

    block: dict[str, Any]
    steps: int = 5
    micro_batches: int = 1
    dtype: torch.dtype = torch.float32
    dropout: float = 0.0
    autocast: bool = False
    side_stream: bool = False


@dataclass
class Trained:
    """Losses of all micro-batches, gradients of each step (one tensor), and memplug's report."""

    losses: list[float] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)


def train(case: Case, with_memplug: bool = True) -> Trained:
    """Train, and return the results on the CPU."""
    network = model(case.dtype, case.dropout)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    generator, result, losses = torch.Generator().manual_seed(1), Trained(), []
    session = memplug.attach(network, case.block) if with_memplug else None
    with contextlib.ExitStack() as stack:
        if case.side_stream:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            stack.enter_context(torch.cuda.stream(side))
        for _ in range(case.steps):
            for _ in range(case.micro_batches):
                tokens = torch.randint(0, 128, (2, 48), generator=generator).to("cuda", non_blocking=True)
                with torch.autocast("cuda", torch.bfloat16, enabled=case.autocast):
                    loss = network(tokens, labels=tokens).loss
                loss.backward()
                losses.append(loss.detach())
            result.gradients.append(torch.cat([parameter.grad.flatten() for parameter in network.parameters()]))
            optimizer.step()
            optimizer.zero_grad()
            if session is not None:
                session.step()
        torch.cuda.synchronize()
    result.losses = [loss.item() for loss in losses]
    result.gradients = [gradient.cpu() for gradient in result.gradients]
    if session is not None:
        result.report = {**session.report().as_dict(), "stage": session.stage.value}
        session.detach()
    return result


ARENA = {"enabled": True, "plan_dir": False, "tokenwise": {"enabled": False}}
CASES = {
    "alpha 0": Case(block(0.0, **ALONE)),
    "alpha 0.3": Case(block(0.3, **ALONE)),
    "alpha 0.5": Case(block(0.5, **ALONE)),
    "alpha 1": Case(block(1.0, **ALONE)),
    "alpha 1, bf16": Case(block(1.0, **ALONE), dtype=torch.bfloat16),
    "alpha 0.3, autocast": Case(block(0.3, **ALONE), autocast=True),
    "alpha 0, dropout": Case(block(0.0, **ALONE), dropout=0.2),
    "alpha 0.5, dropout": Case(block(0.5, **ALONE), dropout=0.2),
    "alpha 1, arena": Case(block(1.0), steps=10),
    "alpha 0.5, arena": Case(block(0.5), steps=10),
    "arena alone": Case(ARENA, steps=10),
    "arena, checked": Case({**ARENA, "arena": {"checks": True}}, steps=10),
    "arena, checked, side stream": Case({**ARENA, "arena": {"checks": True}}, steps=10, side_stream=True),
    "auto": Case(block(), steps=12),
    "auto, bf16, micro-batches": Case(block(), steps=12, dtype=torch.bfloat16, micro_batches=2),
    "auto, no arena": Case(block(arena={"enabled": False}), steps=12),
    "auto, side stream": Case(block(), steps=12, side_stream=True),
    "default": Case({"enabled": True, "plan_dir": False}, steps=12),
}


@functools.cache
def reference(name: str) -> Trained:
    """Return the results without memplug, which do not depend on the schedule, and so are computed once."""
    return train(CASES[name], with_memplug=False)
