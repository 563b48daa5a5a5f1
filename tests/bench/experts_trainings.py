"""Small mixtures of experts in training, with new random tokens in each step: Hugging Face, DeepSpeed, Megatron-Core.

| experts | what they are |
|---|---|
| `grouped` | matmuls over all experts: sizes depend at most on how many tokens the rank's experts got together |
| `looped` | a loop over the experts that got tokens: sizes, and what is requested, depend on the routing |

Megatron-Core's grouped experts are its `TEGroupedMLP`, over the stand-in for Transformer Engine.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

VOCABULARY = 128
EXPERTS = {"grouped": "grouped_mm", "looped": "eager"}  # Hugging Face's names
FEWER_LAYERS = 4  # Qwen3-MoE has 16 times as many experts as Mixtral, so as many fewer layers


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a training: layers, the hidden size, and tokens of a micro-batch."""

    layers: int
    hidden: int
    tokens: int


class Training(Protocol):
    """A model and its optimizer; memplug attaches to `target`."""

    target: Any

    def step(self, session: Any) -> None:
        """Train one step, and end it for the session, if there is one."""


def training_of(model: str, experts: str, micro_batches: int, sizes: Sizes) -> Training:
    """Return a training by the model's name."""
    if model.startswith("megatron"):
        return MegatronMixture(experts, micro_batches, sizes)
    if model == "deepspeed":
        return DeepSpeedMixture(experts, micro_batches, sizes)
    return TransformersMixture(model, experts, micro_batches, sizes)


class TransformersMixture:
    """Hugging Face's Mixtral or Qwen3-MoE; all forwards of a step come before its first backward."""

    def __init__(self, model: str, experts: str, micro_batches: int, sizes: Sizes):
        self.target = transformers_model(model, experts, sizes)
        self._optimizer = torch.optim.SGD(self.target.parameters(), lr=1e-3)
        self._shape = micro_batches, 1, sizes.tokens
        self._random = torch.Generator().manual_seed(1)

    def step(self, session: Any) -> None:
        """Train one step: see `Training`."""
        ids = torch.randint(0, VOCABULARY, self._shape, generator=self._random)
        losses = [self.target(input_ids=each, labels=each).loss for each in ids]
        while losses:
            losses.pop(0).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        if session is not None:
            session.step()


class DeepSpeedMixture:
    """Hugging Face's Mixtral under DeepSpeed's ZeRO 2, whose engine ends the steps itself."""

    def __init__(self, experts: str, micro_batches: int, sizes: Sizes):
        import deepspeed

        model = transformers_model("mixtral", experts, sizes)
        elements = sum(parameter.numel() for parameter in model.parameters()) // sizes.layers  # of a bucket
        adam = {"lr": 1e-4, "torch_adam": True, "fused": True}  # else its temporaries would be most of the memory
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": micro_batches,
            "optimizer": {"type": "AdamW", "params": adam},
            "zero_optimization": {"stage": 2, "reduce_bucket_size": elements, "allgather_bucket_size": elements},
        }
        parameters = model.parameters()
        self.target, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
        self._shape = micro_batches, 1, sizes.tokens
        self._random = torch.Generator().manual_seed(1 + dist.get_rank())

    def step(self, session: Any) -> None:
        """Train one step: see `Training`."""
        for ids in torch.randint(0, VOCABULARY, self._shape, generator=self._random):
            self.target.backward(self.target(input_ids=ids, labels=ids).loss)
            self.target.step()


class MegatronMixture:
    """Megatron-Core's GPTModel; ranks share the experts, and each has tokens of its own."""

    def __init__(self, experts: str, micro_batches: int, sizes: Sizes):
        import model as recipe  # of examples/megatron_llama2

        parallel = recipe.Parallel(expert=dist.get_world_size())
        recipe.initialize(parallel, seed=0)
        shape = {
            "vocab_size": VOCABULARY,
            "hidden_size": sizes.hidden,
            "intermediate_size": 2 * sizes.hidden,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        }
        fields = {"moe_grouped_gemm": experts == "grouped"}
        config = recipe.transformer_config(shape, parallel, torch.float32, **fields)
        self.target = recipe.build_chunks(config, shape, sizes.tokens, distributed_optimizer=False)
        self._optimizer = recipe.build_optimizer(self.target, torch.float32, 1e-4, False)
        self._micro_batches, self._tokens = micro_batches, sizes.tokens
        self._random = torch.Generator().manual_seed(1 + dist.get_rank())

    def step(self, session: Any) -> None:
        """Train one step: see `Training`."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for chunk in self.target:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iter(
                torch.randint(0, VOCABULARY, (self._micro_batches, 1, self._tokens + 1), generator=self._random)
            ),
            model=self.target[0],
            num_microbatches=self._micro_batches,
            seq_length=self._tokens,
            micro_batch_size=1,
            forward_only=False,
        )
        self._optimizer.step()
        if session is not None:
            session.step()

    def _forward(self, batches: Any, module: nn.Module) -> tuple[torch.Tensor, Any]:
        tokens = next(batches)
        positions = torch.arange(self._tokens)[None]
        output = module(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
        return output, lambda output: (output.float().mean(), {})


def transformers_model(name: str, experts: str, sizes: Sizes) -> nn.Module:
    """Return Hugging Face's "mixtral" or "qwen3_moe"."""
    from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": sizes.hidden, "num_hidden_layers": sizes.layers, "vocab_size": VOCABULARY}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    if name == "mixtral":
        config = MixtralConfig(intermediate_size=2 * sizes.hidden, num_local_experts=8, num_experts_per_tok=2, **shape)
        model = MixtralForCausalLM(config)
    else:
        shape["num_hidden_layers"] = max(1, sizes.layers // FEWER_LAYERS)
        of_experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": sizes.hidden // 4}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(head_dim=sizes.hidden // 4, **of_experts, **shape))
    model.set_experts_implementation(EXPERTS[experts])
    return model.train()
