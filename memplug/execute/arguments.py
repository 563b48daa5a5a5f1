"""Arguments of a call as a flat list and back: torch's pytree, without its cost for what layers mostly get."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

_LEAVES = frozenset({torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str})


def flatten(value: Any, flat: list[Any]) -> Any:
    """Append the leaves of nested containers to a list; returns what `unflatten` needs to know of the containers."""
    kind = type(value)
    if kind in _LEAVES:
        flat.append(value)
        return None
    if kind is dict:
        return dict, list(value), [flatten(each, flat) for each in value.values()]
    if kind is tuple or kind is list:
        return kind, (), [flatten(each, flat) for each in value]
    leaves, spec = tree_flatten(value)
    flat.extend(leaves)
    return spec


def tensor_bytes(flat: list[Any]) -> int:
    """Of all tensors among the leaves."""
    return sum(value.nbytes for value in flat if isinstance(value, torch.Tensor))


def unflatten(spec: Any, flat: Iterator[Any]) -> Any:
    """The same containers, with these leaves."""
    if spec is None:
        return next(flat)
    if isinstance(spec, TreeSpec):
        return tree_unflatten([next(flat) for _ in range(spec.num_leaves)], spec)
    kind, keys, parts = spec
    values = [unflatten(part, flat) for part in parts]
    return dict(zip(keys, values, strict=True)) if kind is dict else kind(values)
