"""The small trainings of `tests.bench.host_time`, one function for each way to train."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memplug
from tests.bench import modes
from tests.bench.host_time import Shape

WARM_UP = 16  # for memplug: two steps are compared, two observed, six try plans, and the arena begins


class Training:
    """A model, the way to call its layers, and the attached session, if any."""

    def __init__(self, model: nn.Module, apply: Callable[..., torch.Tensor], session: Any):
        self.model, self.apply, self.session = model, apply, session

    def timed_step(self) -> dict[str, float]:
        """Run one step, and return the processor seconds of its parts and of the whole."""
        for parameter in self.model.parameters():
            parameter.grad = None
        begin = time.process_time()
        out = self.model(self.apply)
        forward = time.process_time()
        out.backward(torch.ones_like(out))
        backward = time.process_time()
        if self.session is not None:
            self.session.step()
        end = time.process_time()
        return {"forward": forward - begin, "backward": backward - forward, "step": end - begin}


def training_of(shape: Shape) -> Training:
    """Return a training that keeps everything, in one thread."""
    torch.set_num_threads(1)
    logging.getLogger("memplug").setLevel(logging.ERROR)
    return Training(_stack(shape).train(), call, None)


@contextlib.contextmanager
def in_mode(training: Training, mode: str, shape: Shape) -> Iterator[None]:
    """Run the training in a mode within the context, after a warm-up."""
    with contextlib.ExitStack() as stack:
        if mode.startswith("memplug"):
            training.session = stack.enter_context(memplug.attach(training.model, _block(mode, shape)))
        elif mode != "keep_all":
            stack.enter_context(_checkpointed(training, mode == "reentrant", shape))
        try:
            for _ in range(WARM_UP):
                training.timed_step()
            yield
        finally:
            training.session = None


@contextlib.contextmanager
def _checkpointed(training: Training, reentrant: bool, shape: Shape) -> Iterator[None]:
    if shape.host == "megatron":  # recomputes by itself
        from tests.bench.megatron import RECOMPUTE

        with pytest.MonkeyPatch.context() as patch:
            for name, value in RECOMPUTE["full"].items():
                patch.setattr(training.model.block.config, name, value)
            yield
        return
    former, training.apply = training.apply, functools.partial(checkpoint, use_reentrant=reentrant)
    try:
        yield
    finally:
        training.apply = former


def call(layer: Callable[..., torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
    """Call the layer unchanged."""
    return layer(hidden)


def _block(mode: str, shape: Shape) -> dict[str, Any]:
    alpha, _, arena = mode.partition(":")[2].partition("+")
    number = "auto" if alpha in ("auto", "plain") else float(alpha)
    regions = {"regions": ["layers.*"]} if shape.host == "transformer_engine" else {}
    device_budget = {"device_budget_gib": 8} if alpha == "plain" else {}
    return {
        "enabled": True,
        "plan_dir": False,
        "tokenwise": {"alpha": number, "min_offload_bytes": 0, **regions},
        **device_budget,
        "swap": {"enabled": False},
        "arena": {"enabled": bool(arena)},
    }


def _stack(shape: Shape) -> nn.Module:
    fields = fields_of(shape.hidden, shape.layers)
    if shape.host == "transformers":
        return modes.Stack(fields, shape.tokens, "cpu")
    if shape.host == "transformer_engine":
        return _Opaque(shape)
    from tests.bench import megatron

    return megatron.Stack(fields, shape.tokens, "cpu", "keep_all")


class _Opaque(nn.Module):
    """Layers whose kernels no operator shows."""

    def __init__(self, shape: Shape):
        super().__init__()
        from tests.support.opaque_layers_worker import Parts

        torch.manual_seed(0)
        self.layers = nn.ModuleList([Parts(width=shape.hidden) for _ in range(shape.layers)])
        self.input = torch.randn(shape.tokens, 1, shape.hidden).requires_grad_()

    def forward(self, apply: Callable[..., torch.Tensor]) -> torch.Tensor:
        hidden = self.input.clone()
        for layer in self.layers:
            hidden = apply(layer, hidden)
        return hidden


def fields_of(hidden: int, layers: int) -> dict[str, Any]:
    """Return the fields of a model with so many layers, for `modes.Stack`."""
    return {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
    }
