"""A mixture of experts whose routing a test decides, step by step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import memplug
from tests.support.mixtures import ended

WIDTH, EXPERTS = 32, 4


@dataclasses.dataclass(frozen=True)
class Choice:
    """The choices for one step of a training.

    Attributes:
        tokens: number of tokens.
        only: the one expert that gets all tokens; -1: no expert gets any; None: the router decides.
        capacity: the most tokens of an expert; further ones are dropped. None: there is no limit.
        frozen: experts whose weights get no gradients.
        evaluates: whether a validation, with every token at expert 0, comes before the step.
    """

    tokens: int = 96
    only: int | None = None
    capacity: int | None = None
    frozen: tuple[int, ...] = ()
    evaluates: bool = False


class ChosenExperts(nn.Module):
    """Experts in a loop over those that got tokens, beside a shared one that gets all."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.SiLU(), nn.Linear(3 * WIDTH, WIDTH)) for _ in range(EXPERTS)
        )
        self.choice = Choice()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the tokens after their experts, of the same shape."""
        weights = self.router(tokens).softmax(-1)
        chosen = weights.argmax(-1)
        only = self.choice.only if self.training else 0
        if only is not None:
            chosen = torch.full_like(chosen, only)
        out = tokens + F.silu(self.shared(tokens))
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero(chosen == number)[: self.choice.capacity, 0]
            if len(rows) or only == -1:  # as in Megatron-Core, an expert may run on no tokens at all
                out = out.index_add(0, rows, expert(tokens[rows]) * weights[rows, number, None])
        return out


def trained(
    choose: Callable[[int], Choice], steps: int, settings: dict[str, Any] | None
) -> tuple[list[float], list[torch.Tensor], dict[str, Any]]:
    """Train on torch's default device; return the losses, the final weights, and memplug's report.

    Args:
        choose: what each step does, by its number.
        steps: number of steps.
        settings: the "memplug" block; None trains without memplug.
    """
    torch.manual_seed(0)
    layers = nn.ModuleList(ChosenExperts() for _ in range(4))
    model = nn.Sequential(*layers).to(torch.get_default_device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = memplug.attach(model, settings) if settings is not None else None
    losses = []
    for number in range(steps):
        choice, generator = choose(number), torch.Generator("cpu").manual_seed(number)
        for layer in layers:
            layer.choice = choice
            for at, expert in enumerate(layer.experts):
                expert.requires_grad_(at not in choice.frozen)
        tokens = torch.randn(choice.tokens, WIDTH, generator=generator, device="cpu").to(torch.get_default_device())
        if choice.evaluates:
            with torch.no_grad():
                losses.append(model.eval()(tokens).square().mean().item())
            model.train()
        loss = model(tokens).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if session is not None:
            session.step()
    return losses, *ended(model, session)
