"""A stack of Megatron-Core's layers for the modes of a benchmark, one process, no parallelism.

`full` and `selective` are Megatron-Core's own recomputation, of a layer at a time and of the core attention. `offload`
is Megatron-Core's own offloading, for layers of Transformer Engine's modules; it offloads the tensors that the parts
named in `RECOMPUTE` save. In Megatron-Core the schedule begins and ends a step's offloading; here the stack does.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import nn

from tests.bench.cases import Case
from tests.support.folders import ROOT

RECOMPUTE: dict[str, dict[str, Any]] = {
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "offload": {
        "fine_grained_activation_offloading": True,
        "offload_modules": ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"],
        "recompute_granularity": "selective",
        "recompute_modules": ["mlp"],
    },
}


class Stack(nn.Module):
    """Decoder layers without embedding and head; parameters and input depend only on the arguments.

    Args:
        shape: Shape of the model, as in the files of configs/models.
        tokens: Tokens of the one sequence.
        device: torch's name of the device.
        mode: "keep_all", or one of RECOMPUTE.
        attention: Passed to the recipe's `block_spec`; "te" makes layers of Transformer Engine's modules.
    """

    def __init__(self, shape: dict[str, Any], tokens: int, device: str, mode: str, attention: str = "sdpa"):
        super().__init__()
        recipe = _recipe(device)
        dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        config = recipe.transformer_config(shape, recipe.Parallel(), dtype, **RECOMPUTE.get(mode, {}))

        from layers import block_spec  # the recipe's
        from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
        from megatron.core.transformer.transformer_block import TransformerBlock

        torch.manual_seed(0)
        spec = block_spec(config, attention=attention)
        self.block = TransformerBlock(config, spec, post_layer_norm=False, post_process=False)
        self.block.to(device=device, dtype=dtype).train()
        hidden = torch.randn(tokens, 1, config.hidden_size, dtype=dtype, device=device)
        self.input = hidden.requires_grad_()
        self.rotary = RotaryEmbedding(config.kv_channels, rotary_percent=1.0)(tokens)
        if config.fine_grained_activation_offloading:
            for parameter in self.parameters():
                _offloading().mark_not_offloadable(parameter)

    @property
    def layers(self) -> nn.ModuleList:
        """Return the decoder layers."""
        return self.block.layers

    def forward(self, apply: Any) -> torch.Tensor:
        """Run all layers as the block calls them; `apply` is not used, since Megatron-Core itself recomputes."""
        if self.block.config.fine_grained_activation_offloading:
            offloading = _offloading()
            offloading.reset()  # ends the previous step
            offloading.init_chunk_handler(1, None, self.block.config.min_offloaded_tensor_size)
        return self.block(hidden_states=self.input.clone(), attention_mask=None, rotary_pos_emb=self.rotary)


def stack_of(case: Case, mode: str) -> Stack:
    """Return the stack of a case."""
    shape = yaml.safe_load((ROOT / "configs" / "models" / f"{case.model}.yaml").read_text())
    attention = "te" if case.host == "megatron-te" else "sdpa"
    return Stack({**shape, "num_hidden_layers": case.layers}, case.tokens, case.device, mode, attention)


def _offloading() -> Any:
    """Return Megatron-Core's own offloading, which its models call."""
    from megatron.core.pipeline_parallel import fine_grained_activation_offload

    return fine_grained_activation_offload.FineGrainedActivationOffloadingInterface


def _recipe(device: str) -> Any:
    """Return the recipe's module `model`, after initializing everything that the module needs."""
    folder = str(ROOT / "examples" / "megatron_llama2")
    first = folder not in sys.path
    if first:
        sys.path.append(folder)
    if first and not device.startswith("cuda"):
        import cpu

        cpu.pretend()
    import model

    if first:
        backend = "nccl" if device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        model.initialize(model.Parallel(), seed=0)
    return model
