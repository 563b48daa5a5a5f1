"""Files like those of Megatron-LM's repository, which is not on PyPI: its training loop, a script and blocks."""

from __future__ import annotations

import json
from pathlib import Path

TRAINING = """
import torch
from torch import nn


def setup_model_and_optimizer(model_type, model_provider_func=None, checkpointing_context=None, **kwargs):
    torch.manual_seed(0)
    model = model_provider_func()
    return [model], torch.optim.SGD(model.parameters(), lr=0.1), None


def train_step(forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config, *args, **kwargs):
    optimizer.zero_grad()
    loss = forward_step_func(data_iterator, model[0])
    loss.backward()
    optimizer.step()
    return {"lm loss": loss.item()}, 0


def pretrain(model_provider, forward_step_func, steps):
    model, optimizer, scheduler = setup_model_and_optimizer(None, model_provider)
    return [train_step(forward_step_func, None, model, optimizer, scheduler, None)[0]["lm loss"] for _ in range(steps)]
"""

SCRIPT = """
import json, sys
from megatron.training import training
from tests.support.hosts import tiny_llama, tokens

def forward_step(data_iterator, model):
    return model(input_ids=tokens(), labels=tokens()).loss

losses = training.pretrain(tiny_llama, forward_step, 4)
json.dump([losses, sys.argv[1:]], open("result.json", "w"))
"""


def write_repository(folder: Path) -> None:
    """Write the package `megatron.training`, `pretrain_gpt.py`, and blocks: ds.json, block.json, off.json."""
    package = folder / "megatron" / "training"
    package.mkdir(parents=True)
    (folder / "megatron" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "training.py").write_text(TRAINING)
    (folder / "pretrain_gpt.py").write_text(SCRIPT)
    block = {"enabled": True, "arena": {"enabled": False}, "tokenwise": {"alpha": 1.0, "min_offload_bytes": 1}}
    (folder / "ds.json").write_text(json.dumps({"memplug": block}))
    (folder / "block.json").write_text(json.dumps(block))
    (folder / "off.json").write_text(json.dumps({"memplug": {"enabled": False}}))
