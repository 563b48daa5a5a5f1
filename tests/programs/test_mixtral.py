"""Hugging Face's Mixtral, top-2 of 8 experts: the same steps with memplug, although routing changes in every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memplug
from tests.support import mixtures
from tests.support.causal_models import mixtral

STEPS = 20


def train(block: dict[str, Any] | None) -> tuple[list[float], list[list[torch.Tensor]], dict[str, Any], set[Any]]:
    """Return losses and gradients of each step, the report, and the token counts per expert of a layer, by step."""
    model = mixtral()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = memplug.attach(model, block) if block is not None else None
    losses, gradients, counts = [], [], set()
    for step in range(STEPS):
        x = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(step))
        out = model(input_ids=x, labels=x, use_cache=False)
        chosen = out.router_logits[0].detach().topk(2).indices
        counts.add(tuple(chosen.flatten().bincount(minlength=8).tolist()))
        optimizer.zero_grad()
        out.loss.backward()
        losses.append(out.loss.item())
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        optimizer.step()
        if session is not None:
            session.step()
    report = session.report().as_dict() if session is not None else {}
    if session is not None:
        session.detach()
    return losses, gradients, report, counts


@pytest.fixture(scope="module")
def plain() -> Any:
    return train(None)


@pytest.mark.parametrize("arena", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 1.0, 0.5, "auto"])
def test_mixture_trains_as_without_memplug(plain, alpha, arena):
    tokenwise = {"alpha": alpha, "min_offload_bytes": 1}
    profiler = {"warmup_steps": 1, "policy_steps": 2}
    block = {"enabled": True, "tokenwise": tokenwise, "profiler": profiler, "arena": {"enabled": arena}}
    losses, gradients, report, counts = train(block)
    assert len(plain[3]) > STEPS / 2, "token counts per expert differ in most steps"
    assert report["offloaded_bytes"] > 0 and (report.get("arena_served", 0) > 0) == arena
    if alpha in (0.0, 1.0):
        assert losses == plain[0] and counts == plain[3]
        for ours, theirs in zip(gradients, plain[1], strict=True):
            assert all(map(torch.equal, ours, theirs))
    else:
        assert losses == pytest.approx(plain[0], abs=1e-3)
        for one, other in zip(gradients[0], plain[1][0], strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.long
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_looped_mixture_trains_300_steps_to_the_bit_by_one_plan(alpha: float) -> None:
    losses, weights, _ = mixtures.trained(300, None)
    own_losses, own_weights, report = mixtures.trained(300, mixtures.block(alpha))
    assert own_losses == losses and all(map(torch.equal, own_weights, weights))
    assert report["arena_plans"] <= 2 and report["arena_dynamic"] > 300
