"""Computes logits and loss of a few tokens at a time.

The logits of a long sequence can take more memory than its layers.

DeepSpeed's `TiledFusedLogitsLoss` runs backward within forward, as if the loss were not scaled: with gradient
accumulation or a loss scale the head's gradients come out too large. Here each tile is a checkpoint of torch's,
computed again in backward, so that gradients follow the loss however it is scaled.
"""

import functools

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func


def tile_loss(model: PreTrainedModel, tiles: int) -> PreTrainedModel:
    """Make a Llama, a Mixtral or a Qwen3 compute logits and loss in `tiles` parts; its outputs then have no logits.

    Returns:
        The model itself; with one tile it is unchanged.
    """
    if tiles > 1:
        model.forward = functools.partial(_forward, model, tiles)
    return model


def tiled_loss(
    head: nn.Module, hidden: torch.Tensor, labels: torch.Tensor, tiles: int, shifted: bool = False
) -> torch.Tensor:
    """Return the mean cross entropy of the next tokens, as Hugging Face's causal models define it.

    Args:
        head: makes logits of hidden states.
        hidden: [batch, tokens, hidden size].
        labels: the tokens themselves or, if `shifted`, each token's next token, int64 [batch, tokens]; −100 marks a
            token without a label.
        tiles: number of parts.
        shifted: whether labels are shifted already.
    """
    if not shifted:
        hidden, labels = hidden[:, :-1], labels[:, 1:]
    hidden, labels = hidden.flatten(0, 1), labels.flatten()
    total = hidden.new_zeros((), dtype=torch.float32)
    for some, their_labels in zip(hidden.chunk(tiles), labels.chunk(tiles), strict=True):
        total = total + checkpoint(_sum, head, some, their_labels, use_reentrant=False)
    return total / (labels != -100).sum()


def _sum(head: nn.Module, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(head(hidden).float(), labels, reduction="sum")


def _forward(
    model: PreTrainedModel,
    tiles: int,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    shift_labels: torch.Tensor | None = None,
) -> MoeCausalLMOutputWithPast:
    experts = bool(getattr(model.config, "output_router_logits", False))
    router = {"output_router_logits": True} if experts else {}
    outputs = model.model(input_ids=input_ids, position_ids=position_ids, **router)
    labels, shifted = (labels, False) if shift_labels is None else (shift_labels, True)
    loss = tiled_loss(model.lm_head, outputs.last_hidden_state, labels, tiles, shifted)
    if not experts:
        return MoeCausalLMOutputWithPast(loss=loss)
    balance = load_balancing_loss_func(outputs.router_logits, model.num_experts, model.num_experts_per_tok)
    return MoeCausalLMOutputWithPast(loss=loss + model.router_aux_loss_coef * balance, aux_loss=balance)
