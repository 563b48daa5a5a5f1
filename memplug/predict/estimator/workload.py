"""The workload of an estimate: a model of a given shape, its batch, dtype and optimizer, for `memplug estimate`."""

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
from memplug.predict.virtual.routing import Routing

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The model and batch that one rank trains.

    Attributes:
        shape: The model's shape.
        layers: The number of decoder layers to train; may be fewer than the shape has.
        seq_len: Tokens in a sequence.
        micro_batch: Sequences in a micro-batch.
        dtype: A key of `DTYPES`; the dtype of parameters and activations.
        head: Whether the model has an embedding, a head and a loss; otherwise only decoder layers train.
        optimizer: Whether AdamW updates the model, with states in the parameters' dtype; without it gradients stay from
            step to step.
        values: The trace of values of a real step; None: no trace.
        routing: How tokens spread over the experts of a mixture; None: as likely as in the trace, or evenly. A Hugging
            Face Mixtral needs a trace or a routing.
        loss_tiles: The number of tiles in which a Hugging Face model computes logits and loss (`tile_loss`).
    """

    shape: Shape
    layers: int
    seq_len: int
    micro_batch: int = 1
    dtype: str = "bf16"
    head: bool = True
    optimizer: bool = True
    values: Values | None = None
    routing: Routing | None = None
    loss_tiles: int = 1

    def make_model(self) -> nn.Module:
        """Make the model on the default device.

        Raises:
            EstimateError: transformers is missing; or the model is a Mixtral, and there is neither a trace of values
                nor a routing.
        """
        is_mixture, values = self.shape.is_mixture, self.values
        if is_mixture and values is None and self.routing is None:
            raise EstimateError(
                "a Mixtral routes its tokens to experts by their values, and the virtual device has no values",
                "Choose a --routing; or record the values of a real step with `memplug.record_values`, and pass the "
                "file with --trace; or estimate Megatron-Core's Mixtral: `memplug estimate` without a DeepSpeed "
                "engine, or with --expert; "
                "`memplug tune` estimates a Mixtral by its parts.",
                code="MP028",
            )
        transformers = needed("transformers")
        name = self.shape.family
        fields = {"max_position_embeddings": self.seq_len, **self.shape.fields, "num_hidden_layers": self.layers}
        config = getattr(transformers, f"{name}Config")(**fields, use_cache=False, attn_implementation="sdpa")
        with by_default(DTYPES[self.dtype]):
            model = getattr(transformers, f"{name}ForCausalLM" if self.head else f"{name}Model")(config)
        is_looped = self.routing is not None or (
            values is not None and any(path.endswith(".experts") for path in values.calls)
        )
        if is_mixture and is_looped:
            model.set_experts_implementation("eager")  # one expert after the other, as in the recorded step
        return tile_loss(model.train(), self.loss_tiles) if self.head else _DecoderStack(model.train())

    def inputs(self) -> dict[str, torch.Tensor]:
        """Make the keyword arguments of the model's forward."""
        if self.head:
            ids = torch.zeros(self.micro_batch, self.seq_len, dtype=torch.long)
            return {"input_ids": ids, "labels": ids}
        size = self.micro_batch, self.seq_len, self.shape.fields["hidden_size"]
        return {"hidden": torch.empty(size, dtype=DTYPES[self.dtype], requires_grad=True)}

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Make an AdamW with fused kernels that update parameters in place, as DeepSpeed's and Megatron-Core's do.

        Args:
            parameters: The model's parameters.
        """
        return torch.optim.AdamW(parameters, fused=True)


class _DecoderStack(nn.Module):
    """The decoder layers of a model, without embedding and head.

    Their input is not an autograd leaf, just as an embedding's output is not.
    """

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
    """Set torch's default dtype inside the context.

    Args:
        dtype: The default dtype of new floating-point tensors.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
