"""Support for tests of the planned arena: small models that train with and without it, on the same data."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import memplug
from memplug import native
from memplug.arena.technique import ArenaState, PlannedAddresses

ALONE = {"enabled": True, "tokenwise": {"enabled": False}, "plan_dir": False}
"""A block with the arena, without token-wise recomputation."""

CHECKED = {**ALONE, "arena": {"checks": True}}

Model = Callable[[], nn.Module]


def llama() -> nn.Module:
    """Return a dense model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes))


def mixtral() -> nn.Module:
    """Return a mixture whose experts run in a loop, so that their requests depend on the routing."""
    model = grouped_mixtral()
    model.set_experts_implementation("eager")
    return model


def grouped_mixtral() -> nn.Module:
    """Return a mixture whose experts run in grouped matmuls, which request the same bytes for any routing."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=64, num_key_value_heads=2, **sizes, **experts))


@dataclass
class Run:
    """The results of a training.

    Attributes:
        losses: the losses of all steps and validations, and then the sum of all parameters.
        mismatched: for each step, the requests that the plan had no bytes for.
        states: states of the arena after each step.
    """

    losses: list[float] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    mismatched: list[int] = field(default_factory=list)
    states: list[ArenaState] = field(default_factory=list)

    @property
    def served(self) -> float:
        """Return the share of requests that the arena served, counted from the first step with a plan on."""
        served = self.report["arena_served"] + self.report["arena_dynamic"] + self.report["arena_reusable"]
        return served / (served + self.report["arena_fallback"])


def serving_of(session: memplug.Session) -> PlannedAddresses:
    """Return the technique that decides when the session's arena serves."""
    technique = session._attached.boundary.followers.find("arena")
    assert technique is not None, "it has an arena"
    return technique


def train(
    block: dict[str, Any],
    model: Model = llama,
    steps: int = 14,
    *,
    validate: int = 0,
    length: Callable[[int], int] = lambda step: 16,
    around: Callable[[int, nn.Module], contextlib.AbstractContextManager[Any]] = lambda step, model: (
        contextlib.nullcontext()
    ),
) -> Run:
    """Train on random tokens; equal arguments give equal tokens.

    Args:
        block: the session's block.
        model: makes the model.
        steps: number of steps.
        validate: steps between validations; 0: none.
        length: returns the length of a step's sequences.
        around: makes a context around each step's forward and backward.
    """
    torch.manual_seed(0)
    network, run = model(), Run()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    tokens = torch.Generator().manual_seed(1)
    with memplug.attach(network, block) as session:
        for step in range(steps):
            batch = torch.randint(0, 64, (2, length(step)), generator=tokens)
            with around(step, network):
                loss = network(batch, labels=batch).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.losses.append(loss.item())
            session.step()
            serving = session._attached.boundary.followers.find("arena") if hasattr(session, "_attached") else None
            if serving is not None:
                run.mismatched.append(serving.step.mismatched)
                run.states.append(serving.state)
            if validate and step % validate == validate - 1:
                with torch.no_grad():
                    run.losses.append(network(batch, labels=batch).loss.item())
        run.report = session.report().as_dict()
    run.losses.append(sum(parameter.double().sum().item() for parameter in network.parameters()))
    return run


@contextlib.contextmanager
def nothing_leaks() -> Iterator[None]:
    """Assert that memory reserved inside the `with` is released by its end."""
    before = reserved_bytes()
    yield
    gc.collect()
    assert reserved_bytes() <= before


def reserved_bytes() -> int:
    """Return the bytes that all arenas of this process have reserved."""
    return native.load().arenas_reserved_bytes()


def owned(tensor: torch.Tensor) -> bool:
    """Return whether the arena's memory contains a tensor."""
    return native.load().arena_owns(tensor.data_ptr())
