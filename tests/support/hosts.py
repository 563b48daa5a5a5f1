"""A tiny Llama, a DeepSpeed engine on the CPU, and functions that train and compare them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from memplug.block import TECHNIQUES

VOCABULARY = 64
# the session sees the first step, observes the second with device times, and runs the third by the plan
QUICK: dict[str, Any] = {"warmup_steps": 0, "policy_steps": 0, "wait_for_plans": True}
DISABLED: list[dict[str, Any]] = [
    {},
    {"enabled": False},
    {"enabled": True, **{name: {"enabled": False} for name in TECHNIQUES}},
]


def tiny_llama(layers: int = 3, **fields: Any) -> LlamaForCausalLM:
    """Return a Llama with the same weights at every call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **fields,
    )
    return LlamaForCausalLM(config)


def tokens(seed: int = 0, batch: int = 2, length: int = 12) -> torch.Tensor:
    """Return random tokens, int64[batch, length]."""
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, seed: int = 0) -> torch.Tensor:
    """Run one forward and backward of a Hugging Face model, and return the loss."""
    x = tokens(seed)
    loss = model(input_ids=x, labels=x).loss
    loss.backward()
    return loss.detach()


def block(**tokenwise: Any) -> dict[str, Any]:
    """Return an enabled "memplug" block that swaps even the smallest tensor, and plans after two steps.

    On a GPU, where everything may fit, tests also need the fixture `keeps_nothing`; the CPU keeps nothing anyway.
    """
    return {"enabled": True, "profiler": QUICK, "tokenwise": {"min_offload_bytes": 1, **tokenwise}}


def ds_config(stage: int = 0, memplug: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """Return a DeepSpeed configuration, without a "memplug" block if `memplug` is None."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        **fields,
    }
    return config if memplug is None else {**config, "memplug": memplug}


def make_engine(config: dict[str, Any] | str, model: nn.Module | None = None, mpu: Any = None) -> Any:
    """Call `deepspeed.initialize`, whether memplug has patched it or not, and return the engine."""
    import deepspeed

    model = tiny_llama() if model is None else model
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, mpu=mpu)[0]


def train_engine(engine: Any, steps: int, first: int = 0) -> list[float]:
    """Run optimizer steps, each over all its micro-batches, and return the losses of the micro-batches."""
    losses = []
    for index in range(steps * engine.gradient_accumulation_steps()):
        x = tokens(first + index)
        loss = engine(input_ids=x, labels=x).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@contextlib.contextmanager
def process_group(folder: Path) -> Iterator[None]:
    """Make a group of this process alone, for DeepSpeed on the CPU."""
    environment = {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}
    with mock.patch.dict(os.environ, environment):
        yield from _joined(folder)


def _joined(folder: Path) -> Iterator[None]:
    import deepspeed

    # DeepSpeed would first compile a shared-memory all-reduce, which takes half a minute
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    groups = sys.modules["deepspeed.utils.groups"]
    before, linear = dict(vars(groups)), nn.functional.linear
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    try:
        deepspeed.init_distributed("gloo")
        yield
    finally:
        dist.destroy_process_group()
        deepspeed.comm.comm.cdb = None  # DeepSpeed keeps references to groups that are gone
        vars(groups).update(before)
        nn.functional.linear = linear  # ZeRO 3 replaces it for good


def fingerprint(target: Any) -> dict[str, Any]:
    """Return the types and attributes of an object and of all its modules, to detect what memplug changed."""
    objects = {"": target} if not isinstance(target, nn.Module) else dict(target.named_modules())
    seen: dict[str, Any] = {}
    for name, one in objects.items():
        seen[name] = type(one), {key: _identity(value) for key, value in one.__dict__.items()}
    return seen


def _identity(value: Any) -> Any:
    """Return the identity of an attribute's value and, for a container, of its items."""
    if isinstance(value, dict):
        return id(value), {key: id(item) for key, item in value.items()}
    return id(value) if not isinstance(value, (int, float, str, bool, type(None))) else value
