"""What trains: a model of a shape, its batch, its dtype and its optimizer, as `memplug estimate` is told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memplug.errors import EstimateError
from memplug.predict.estimator.shapes import Shape, needed
from memplug.predict.estimator.tiled_loss import tile_loss
from memplug.predict.estimator.values import Values

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One rank's.

    Attributes:
        shape: of the model.
        layers: of it, or fewer.
        seq_len: tokens of a sequence.
        micro_batch: sequences.
        dtype: of `DTYPES`, of parameters and activations.
        head: the model has an embedding, a head and a loss; else decoder layers alone train.
        optimizer: AdamW, with states in the parameters' dtype; else gradients stay from step to step.
        values: the trace of a real step, which a Mixtral needs; None: there is none.
        loss_tiles: parts in which a model of Hugging Face's has its logits and its loss, one after the other.
    """

    shape: Shape
    layers: int
    seq_len: int
    micro_batch: int = 1
    dtype: str = "bf16"
    head: bool = True
    optimizer: bool = True
    values: Values | None = None
    loss_tiles: int = 1

    def make_model(self) -> nn.Module:
        """Where tensors are made by default.

        Raises:
            EstimateError: transformers is missing, or the model routes tokens to experts by their values, and there is
                no trace of them.
        """
        is_mixture, values = self.shape.is_mixture, self.values
        if is_mixture and values is None:
            raise EstimateError(
                "a Mixtral routes its tokens to experts by their values, which the virtual device has none of",
                "Record those of a real step with `memplug.record_values`, and give them with --trace; or estimate one "
                "of Megatron-Core's: `memplug estimate` without a DeepSpeed engine, or with --expert; `memplug tune` "
                "estimates a Mixtral by its parts.",
                code="MP028",
            )
        transformers = needed("transformers")
        name = self.shape.family
        fields = {"max_position_embeddings": self.seq_len, **self.shape.fields, "num_hidden_layers": self.layers}
        config = getattr(transformers, f"{name}Config")(**fields, use_cache=False, attn_implementation="sdpa")
        with by_default(DTYPES[self.dtype]):
            model = getattr(transformers, f"{name}ForCausalLM" if self.head else f"{name}Model")(config)
        if is_mixture and any(path.endswith(".experts") for path in values.calls):
            model.set_experts_implementation("eager")  # as in the trace: one after the other, by their tokens
        return tile_loss(model.train(), self.loss_tiles) if self.head else _Layers(model.train())

    def inputs(self) -> dict[str, torch.Tensor]:
        """Of its forward."""
        if self.head:
            ids = torch.zeros(self.micro_batch, self.seq_len, dtype=torch.long)
            return {"input_ids": ids, "labels": ids}
        size = self.micro_batch, self.seq_len, self.shape.fields["hidden_size"]
        return {"hidden": torch.empty(size, dtype=DTYPES[self.dtype], requires_grad=True)}

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """As DeepSpeed's and Megatron-Core's, it goes over all parameters at once, in place."""
        return torch.optim.AdamW(parameters, fused=True)


class _Layers(nn.Module):
    """The decoder layers of a model. Their input is no leaf, as an embedding's output is none."""

    def __init__(self, model: Any):
        super().__init__()
        self.layers, self.rotary = model.layers, model.rotary_emb

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        rotated, hidden = self.rotary(hidden, positions), hidden.clone()
        for layer in self.layers:
            out = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotated)
            hidden = out[0] if isinstance(out, tuple) else out
        return hidden


@contextlib.contextmanager
def by_default(dtype: torch.dtype) -> Iterator[None]:
    """Within, tensors of no dtype have that one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
