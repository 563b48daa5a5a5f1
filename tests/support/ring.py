"""torch's context parallelism on the CPU: its ring around the CPU's attention operator.

torch itself has the ring on CUDA only (`torch.distributed.tensor.experimental.context_parallel`; 2.13 has no rule for
the CPU's operator).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
TOKENS = 2  # the token dimension of queries, keys and values


@functools.cache
def enable() -> None:
    """Enable the ring for the rest of the process.

    torch's `context_parallel` then turns it on and off, as for torch's own operators.
    """
    from torch.distributed.tensor.experimental._context_parallel import _attention

    def handle(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
        mesh = args[0].device_mesh
        own = [value.to_local() if isinstance(value, DTensor) else value for value in args]
        if op is _FORWARD:
            query, key, value, dropout, causal = (*own, 0.0, False)[:5]
            ring, ringed = _attention._templated_ring_attention, {"op": _forward}
        else:
            gradient, query, key, value, out, logsumexp, dropout, causal = own
            ring, ringed = _attention._templated_ring_attention_backward, {"op": _backward, "grad_out": gradient}
            ringed |= {"grad_out_name": "grad_out", "out": out, "logsumexp": logsumexp}
        common = {"query": query, "key": key, "value": value, "is_causal": causal, "dropout_p": dropout, **kwargs}
        found = ring(mesh.get_group(), TOKENS, **ringed, **common)
        return tuple(DTensor.from_local(tensor, mesh, [Shard(TOKENS)], run_check=False) for tensor in found)

    _attention.custom_ops.update({_FORWARD: handle, _BACKWARD: handle})


def set_balanced(balanced: bool) -> None:
    """Set whether each rank has two parts of a sequence, one near the start and one near the end, or a single part.

    With a single part, the first ranks have fewer keys to attend to, and run fewer operators.
    """
    from torch.distributed.tensor.experimental._context_parallel import _attention

    _attention._cp_options.enable_load_balance = balanced


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, dropout_p: float, **kwargs: Any
) -> Any:
    return _FORWARD(query, key, value, dropout_p, is_causal, **kwargs)


def _backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    grad_out: torch.Tensor,
    is_causal: bool,
    dropout_p: float,
    **kwargs: Any,
) -> Any:
    return _BACKWARD(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, **kwargs)
