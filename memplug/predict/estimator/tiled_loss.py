"""Computes logits and loss for one tile of the tokens at a time, as `--tiled-loss` of the DeepSpeed recipe does.

The logits of a long sequence can take more memory than the layers. Each tile runs under `torch.utils.checkpoint`, so
backward recomputes it.
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def tile_loss(model: nn.Module, tiles: int) -> nn.Module:
    """Make a causal model of Hugging Face compute its loss in tiles, and return only the loss.

    Args:
        model: The model; its `forward` is replaced.
        tiles: The number of tiles; 1 leaves the model unchanged.
    """
    if tiles > 1:
        model.forward = functools.partial(_forward, model, tiles)
    return model


def _forward(model: nn.Module, tiles: int, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of predicting each next token; labels of -100 do not count.

    Args:
        model: The model whose forward this replaces.
        tiles: The number of tiles.
        input_ids: int64[batch, tokens].
        labels: int64[batch, tokens].

    Returns:
        A float32 scalar.
    """
    hidden = model.model(input_ids=input_ids).last_hidden_state
    hidden, labels = hidden[:, :-1], labels[:, 1:]
    hidden, labels = hidden.flatten(0, 1), labels.flatten()
    total = hidden.new_zeros((), dtype=torch.float32)
    for some, their_labels in zip(hidden.chunk(tiles), labels.chunk(tiles), strict=True):
        total = total + checkpoint(_sum, model.lm_head, some, their_labels, use_reentrant=False)
    return total / (labels != -100).sum()


def _sum(head: nn.Module, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(head(hidden).float(), labels, reduction="sum")
