"""A small Mixtral that runs its experts in a loop, trained with new tokens in each step, and its results."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

import memplug

VOCABULARY = 64


def block(alpha: float) -> dict[str, Any]:
    """Return a block with which even the smallest tensor is swapped, and the arena serves."""
    tokenwise = {"alpha": alpha, "min_offload_bytes": 1}
    return {"enabled": True, "plan_dir": False, "tokenwise": tokenwise, "profiler": {"wait_for_plans": True}}


def trained(steps: int, settings: dict[str, Any] | None) -> tuple[list[float], list[torch.Tensor], dict[str, Any]]:
    """Train on torch's default device; return the losses, the final weights, and memplug's report.

    Args:
        steps: number of steps.
        settings: the "memplug" block; None trains without memplug.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=VOCABULARY, num_hidden_layers=3, **sizes, **experts))
    model.set_experts_implementation("eager")
    device = torch.get_default_device()
    model.to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    tokens, losses = torch.Generator().manual_seed(1), []
    session = memplug.attach(model, settings) if settings is not None else None
    for _ in range(steps):
        ids = torch.randint(0, VOCABULARY, (2, 40), generator=tokens, device="cpu").to(device)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if session is not None:
            session.step()
    return losses, *ended(model, session)


def ended(model: nn.Module, session: memplug.Session | None) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """End a session, if there is one; return the model's weights, on the CPU, and memplug's report."""
    report = session.report().as_dict() if session is not None else {}
    if session is not None:
        session.detach()
    return [parameter.detach().cpu().clone() for parameter in model.parameters()], report
