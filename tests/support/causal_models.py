"""Small causal language models of Hugging Face."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")


SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SHAPE, "num_key_value_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SHAPE),
    "llama with grouped queries": ("LlamaConfig", GROUPED),
    "mistral with a window": ("MistralConfig", {**GROUPED, "sliding_window": 4}),
    "qwen2": ("Qwen2Config", GROUPED),
    "qwen3": ("Qwen3Config", {**GROUPED, "head_dim": 8}),
    "gemma2": ("Gemma2Config", {**GROUPED, "head_dim": 8, "sliding_window": 4}),
    "phi3": ("Phi3Config", GROUPED),
    "mixtral": (
        "MixtralConfig",
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": False},
    ),
}


class Causal(nn.Module):
    """A causal language model whose decoder layers are found where `tokenwise` looks for them."""

    def __init__(self, kind: str, dtype: torch.dtype = torch.float32, attention: str = "sdpa", **changes: Any):
        super().__init__()
        name, settings = MODELS[kind]
        config = getattr(transformers, name)(**{**settings, **changes})
        torch.manual_seed(0)
        self.model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention
        ).train()

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.model.layers

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss


def mixtral() -> nn.Module:
    """Return a Mixtral of two layers, top-2 of 8 experts, with the same weights at every call."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": True}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads, **experts))
