"""The small trainings of `tests.bench.host_time`, one function for each way to train."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memplug
from tests.bench import modes
from tests.bench.host_time import Shape
from tests.support.swapped import GIB, block

LIST_SHARE = 0.69  # of what a step takes, for a list of some 100 tensors
WARM_UP = 16  # of memplug: two are compared, two observed, six try plans, and the arena begins


class Training:
    """A model, how its layers are called, and the session that is attached to it, if any."""

    def __init__(self, model: nn.Module, apply: Callable[..., torch.Tensor], session: Any):
        self.model, self.apply, self.session = model, apply, session

    def timed_step(self) -> dict[str, float]:
        """Seconds of processor time of one step and of its parts."""
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


@contextlib.contextmanager
def prepared(mode: str, shape: Shape) -> Iterator[Training]:
    """A training in that mode, warm."""
    torch.set_num_threads(1)
    logging.getLogger("memplug").setLevel(logging.ERROR)
    model = _stack(shape, mode)
    apply = functools.partial(checkpoint, use_reentrant=mode == "reentrant") if "reentrant" in mode else _call
    training = Training(model.train(), apply, None)
    if mode.startswith(("memplug", "swap")):
        budget_gib = LIST_SHARE * _peak_gib(training) if mode == "swap:list" else 1.0
        training.session = memplug.attach(model, _block(mode, budget_gib))
    try:
        for _ in range(WARM_UP):
            training.timed_step()
        if mode == "swap:list":
            report = training.session.report()
            assert report["swap_repeated"] > 0, f"no list is in force and settled: {report['swap']}"
            print(f"{mode}: {report['swap_tensors']} tensors, {report['swap_planned_bytes']} bytes", flush=True)
        yield training
    finally:
        if training.session is not None:
            training.session.detach()


def _call(layer: Callable[..., torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
    return layer(hidden)


def _peak_gib(training: Training) -> float:
    """What a step takes of a device that has room for it, as recorded."""
    training.session = memplug.attach(training.model, _block("swap:none", 1.0))
    for step in range(5):
        if step == 3:
            training.session.record()
        training.timed_step()
    peak_bytes = int(training.session.trace.live_bytes.max())
    training.session.detach()
    return peak_bytes / GIB


def _block(mode: str, budget_gib: float) -> dict[str, Any]:
    if mode.startswith("swap"):
        return block(budget_gib)
    alpha, _, arena = mode.partition(":")[2].partition("+")
    number = "auto" if alpha in ("auto", "plain") else float(alpha)
    device_budget = {"device_budget_gib": 8} if alpha == "plain" else {}
    return {
        "enabled": True,
        "plan_dir": False,
        "tokenwise": {"alpha": number, "min_offload_bytes": 0},
        **device_budget,
        "swap": {"enabled": False},
        "arena": {"enabled": bool(arena)},
    }


def _stack(shape: Shape, mode: str) -> nn.Module:
    fields = {
        "hidden_size": shape.hidden,
        "intermediate_size": 2 * shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
    }
    if shape.host == "transformers":
        return modes.Stack(fields, shape.tokens, "cpu")
    from tests.bench import megatron

    return megatron.Stack(fields, shape.tokens, "cpu", "full" if mode == "reentrant" else "keep_all")
