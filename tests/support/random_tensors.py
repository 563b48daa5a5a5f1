"""Steps of random layers with operators and tensors of every kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

if TYPE_CHECKING:
    from tests.support.random_layers import Layer

WIDTH = 8


class Named(torch.Tensor):
    """A tensor subclass without behaviour of its own."""


class Wrapper(torch.Tensor):
    """A tensor subclass with its own dispatch."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [arg.inner if isinstance(arg, Wrapper) else arg for arg in args]
        return cls(func(*plain, **(kwargs or {})))


# -- operators ---------------------------------------------------------------------------------------------------------


def sin(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return y.sin()


def linear(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return layer.other(y).sigmoid()


def norm(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return layer.norm(y)


def gelu(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return F.gelu(y)


def softmax(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return y.softmax(-1)


def batch_norm(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return layer.batch_norm(y)


def convolution(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return F.conv1d(y, layer.other.weight[:4, :4, None].contiguous())


def attention(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    heads = y.unflatten(-1, (2, -1)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(-2)


def recurrent(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return layer.lstm(y)[0]


def spectral(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return layer.spectral(y)


def in_place(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return layer.linear(y).mul_(1.5).relu_()


def sets_items(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    made = y.clone()
    made[..., 0] = made[..., 1] * 2
    made[made > 1] = 1
    return made


def writes_data(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    made = y * 1
    made.data.mul_(2)
    return made.sin()


def writes_out(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(y)
    with torch.no_grad():
        torch.sin(y, out=made)
    return y * made


def resizes(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    made = torch.empty(0)
    made.resize_(y.shape).copy_(y.detach())
    return y * made


def routed(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    flat = y.flatten(0, 1)
    chosen = flat[:, 0].detach().topk(3).indices
    return flat.index_add(0, chosen, layer.other(flat[chosen])).view_as(y)


def masked(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return y.masked_scatter(y > 0, layer.other(y)[y > 0])


def sorts(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return y.gather(-1, y.argsort(-1)).cumsum(-1) * y.detach().round().unique().numel()


def foreach(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    one, other = torch._foreach_mul([y, y.sin()], 1.5)
    return one * other


def reads_number(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return y * y.detach().mean().sin().item()


# -- layouts and dtypes ------------------------------------------------------------------------------------------------


def expanded(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return y * y.mean(1, keepdim=True).expand_as(y)


def strided(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return torch.cat([y[..., ::2].transpose(0, 1), y[..., 1::2].transpose(0, 1)], -1).transpose(0, 1).sin()


def overlapping(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return y * y.unfold(-1, 4, 2).sin().mean((-1, -2))[..., None]


def empty(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return torch.cat([y, layer.other(y[:0]).sin()]) + y[:, :0].sum()


def complex_numbers(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    z = torch.fft.rfft(y)
    return torch.fft.irfft(z * z.conj(), WIDTH) + z.imag.neg().mean()


def conjugates(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    z = torch.view_as_complex(layer.other(y).unflatten(-1, (-1, 2)).contiguous()).conj()
    return torch.view_as_real(z.sin() * z.conj() * z.resolve_conj()).flatten(-2)


def lazy(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return (torch._neg_view(y) * y).sigmoid()


def zeros(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return y + y.sin() * torch._efficientzerotensor(y.shape)


def half(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return y.half().sin().to(torch.bfloat16).exp().to(y.dtype)


def sparse(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    weights = torch.eye(WIDTH).to_sparse()
    return torch.sparse.mm(weights, y.flatten(0, 1).t()).t().view_as(y) * y


def sparse_values(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    flat = y.flatten(0, 1)
    return y * torch.sparse.mm(flat.sigmoid().to_sparse(), layer.other.weight).view_as(y)


def sparse_gradient(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return y * F.embedding(torch.arange(y.shape[1]), layer.table, sparse=True)


def compressed(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    weights = torch.eye(WIDTH).to_sparse_csr()
    return y * (weights @ y.flatten(0, 1).t()).t().view_as(y)


def quantized(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return y * torch.quantize_per_tensor(y.detach(), 0.1, 3, torch.quint8).dequantize()


def quantized_channels(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    scales, zeros = torch.full((WIDTH,), 0.1), torch.zeros(WIDTH, dtype=torch.long)
    return y * torch.quantize_per_channel(y.detach().float(), scales, zeros, 2, torch.qint8).dequantize()


def fake_quantized(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return torch.fake_quantize_per_tensor_affine(y, 0.1, 0, -128, 127)


def float8(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return y * y.detach().to(torch.float8_e4m3fn).to(y.dtype)


def jagged(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    flat = y.flatten(0, 1)
    nested = torch.nested.nested_tensor_from_jagged(flat, torch.tensor([0, 3, len(flat)]))
    return F.silu(nested).values().view_as(y)


def nested(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return torch.nested.as_nested_tensor([*y]).sin().to_padded_tensor(0.0)


# -- tensors without values, and subclasses ----------------------------------------------------------------------------


def meta(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return y.sin() * layer.linear.weight.to("meta").t().shape[0]


def meta_graph(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    shapes = (y.to("meta").sin() * y.to("meta")).exp()
    return y.sin() * (shapes.shape[0] + F.linear(shapes, torch.empty(3, WIDTH, device="meta")).shape[-1])


def meta_gradient(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    leaf = torch.empty(y.shape, device="meta", requires_grad=True)
    (gradient,) = torch.autograd.grad((leaf.sin() * leaf).sum(), leaf)
    return y.sin() * gradient.shape[-1]


def fake(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode():
        made = torch.empty(2, 3, requires_grad=True).sin() @ torch.empty(3, 5)
    return y.sin() * made.shape[1]


def subclass(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return (y * y.detach().as_subclass(Named).sigmoid()).as_subclass(torch.Tensor)


def wrapped(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return y * Wrapper(y.detach()).mul(2).inner


def two_tensors(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return y + (TwoTensor(y.detach(), y.detach().cos()).requires_grad_().sin() * 2).detach().a


def numpy_copy(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return y * torch.from_numpy(np.sin(y.detach().numpy()))


STEPS = (
    *(sin, linear, norm, gelu, softmax, batch_norm, convolution, attention, recurrent, spectral, in_place, sets_items),
    *(writes_data, writes_out, resizes, routed, masked, sorts, foreach, reads_number, expanded, strided, overlapping),
    *(empty, complex_numbers, conjugates, lazy, zeros, half, sparse, sparse_values, sparse_gradient, compressed),
    *(quantized, quantized_channels, fake_quantized, float8, jagged, nested, meta, meta_graph, meta_gradient, fake),
    *(subclass, wrapped, two_tensors, numpy_copy),
)
