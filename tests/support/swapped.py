"""Trainings that have to swap: models of several kinds, and the memory of one step."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import memplug
from memplug.profile.trace import Trace

GIB = 2**30
SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}

Batch = Callable[[torch.Generator], dict[str, torch.Tensor]]


class Convolutions(nn.Module):
    """A model of convolutions with norms, an activation in place, dropout, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        layers = [
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(inplace=True), nn.Dropout(0.1))
            for _ in range(8)
        ]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(8 * 32 * 32, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.layers(images).flatten(1)), labels)


class Wide(nn.Module):
    """A model whose weights, with their optimizer state, are as large as its layers' outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Adapted(nn.Module):
    """A model of frozen weights, which are most of its memory, each with a low-rank adapter (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256).requires_grad_(False) for _ in range(6))
        self.down = nn.ModuleList(nn.Linear(256, 4, bias=False) for _ in self.layers)
        self.up = nn.ModuleList(nn.Linear(4, 256, bias=False) for _ in self.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, down, up in zip(self.layers, self.down, self.up, strict=True):
            x = torch.tanh(layer(x) + up(down(x)))
        return x.square().mean()


class Hub(nn.Module):
    """A Hugging Face model that returns its loss."""

    def __init__(self, name: str, config: str, **fields: Any):
        super().__init__()
        import transformers

        self.model = getattr(transformers, name)(getattr(transformers, config)(**fields))

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return self.model(**inputs).loss


def _images(generator: torch.Generator) -> dict[str, torch.Tensor]:
    images = torch.randn(8, 8, 32, 32, generator=generator)
    return {"images": images, "labels": torch.randint(0, 10, (8,), generator=generator)}


def _rows(generator: torch.Generator, count: int = 1024) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(count, 256, generator=generator)}


def _pixels(generator: torch.Generator) -> dict[str, torch.Tensor]:
    images = torch.randn(12, 3, 64, 64, generator=generator)
    return {"pixel_values": images, "labels": torch.randint(0, 2, (12,), generator=generator)}


def _tokens(generator: torch.Generator) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, 128, (12, 96), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def _llama(vocabulary: int = 512) -> nn.Module:
    return Hub("LlamaForCausalLM", "LlamaConfig", **SIZES, vocab_size=vocabulary, use_cache=False)


def _mixtral() -> nn.Module:
    return Hub(
        "MixtralForCausalLM",
        "MixtralConfig",
        **{**SIZES, "num_hidden_layers": 4, "intermediate_size": 64},
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=128,
        use_cache=False,
    )


def _vit() -> nn.Module:
    return Hub("ViTForImageClassification", "ViTConfig", **SIZES, image_size=64, patch_size=8)


def _t5() -> nn.Module:
    sizes = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16}
    name = "T5ForConditionalGeneration"
    return Hub(name, "T5Config", **sizes, vocab_size=512, decoder_start_token_id=0, use_cache=False)


MODELS: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "llama": (_llama, _tokens),
    "large vocabulary": (functools.partial(_llama, 4096), _tokens),
    "vit": (_vit, _pixels),
    "t5": (_t5, _tokens),
    "convolutions": (Convolutions, _images),
    "wide": (Wide, _rows),
    "adapted": (Adapted, functools.partial(_rows, count=250)),
    "mixtral": (_mixtral, _tokens),
}


@dataclass
class Trained:
    """The results of a training."""

    losses: list[float]
    parameters: list[torch.Tensor] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    peak_bytes: int = 0
    """The most bytes in use at once in the last step, as recorded."""
    last_passive: int = 0
    """Tensors that were offloaded for failed requests in the last step."""


def block(device_budget_gib: float, **parts: Any) -> dict[str, Any]:
    """Return a block with the swap list alone, which accepts any tensor and waits for plans."""
    return {
        "enabled": True,
        "plan_dir": False,
        "device_budget_gib": device_budget_gib,
        "swap": {"enabled": True, "min_bytes": 1},
        "tokenwise": {"enabled": False},
        "arena": {"enabled": False},
        "profiler": {"wait_for_plans": True},
        **parts,
    }


def train(kind: str, config: dict[str, Any] | None, steps: int = 12) -> Trained:
    """Train a model of a kind, without memplug if `config` is None."""
    make, batch = MODELS[kind]
    gc.collect()  # on a device, memory that an earlier training still holds counts too
    torch.manual_seed(0)
    model = make().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = memplug.attach(model, config) if config is not None else None
    generator, losses = torch.Generator("cpu").manual_seed(1), []
    with torch.device("cpu"):
        batches = [batch(generator) for _ in range(steps)]
    device = next(model.parameters()).device
    for step, inputs in enumerate(batches):
        torch.manual_seed(step)
        loss = model(**{name: value.to(device) for name, value in inputs.items()})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        del loss
        if session is not None:
            if step == steps - 2:
                session.record()
                passive = session.report().swap.passive
            session.step()
    trained = Trained(losses)
    if session is not None:
        trained.report, trained.peak_bytes = session.report().as_dict(), int(session.trace.live_bytes.max())
        trained.last_passive = trained.report["swap_passive"] - passive
        session.detach()
    # copies, so that the model's own memory is freed
    trained.parameters = [parameter.detach().cpu().clone() for parameter in model.parameters()]
    return trained


def trace_of(kind: str, config: dict[str, Any]) -> Trace:
    """Record one step of a training with its tensors."""
    make, batch = MODELS[kind]
    torch.manual_seed(0)
    model = make().train()
    generator = torch.Generator("cpu").manual_seed(1)
    with memplug.attach(model, config) as session:
        for step in range(2):
            model(**batch(generator)).backward()
            if step == 0:
                session.record()
            session.step()
        return session.trace
