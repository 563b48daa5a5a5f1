"""A device with simple rates, an H200, and the layers that were measured on an H200."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from memplug.predict.virtual import GpuProfile, Rate, VirtualDevice
from tests.support.folders import ROOT

H200 = ROOT / "configs" / "hardware" / "h200.json"
MIB = 1 << 20
SIMPLE = GpuProfile(
    name="simple",
    memory_bytes=1e12,
    peak_flops=2e9,
    matmul_flops={"bfloat16": Rate.always(1e9), "float32": Rate.always(1e9)},
    attention_forward_flops={"flash": Rate.always(1e12)},
    attention_backward_flops={"flash": Rate.always(1e12)},
    memory_bytes_per_s=1e9,
    kernel_s=1e-6,
    to_host_bytes_per_s=Rate.always(1e6),
    to_device_bytes_per_s=Rate.always(2e6),
    to_host_both_bytes_per_s=Rate.always(1e6),
    to_device_both_bytes_per_s=Rate.always(2e6),
    copy_s=1e-9,
    launch_s=1e-9,
    observe_s=1e-12,
    region_s=1e-12,
    restore_s=1e-12,
    collective_bytes_per_s=4e6,
    collective_s=1e-3,
)


def on_device(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="virtual")


def seconds(device: VirtualDevice) -> float:
    return device.synchronize()


TOKEN_HEADS, HIDDEN, INTERMEDIATE = 32, 4096, 11008


class DecoderLayer(nn.Module):
    """The decoder layer that was measured on an H200: a layer of a 7B Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN, eps=1e-5) for _ in range(2))
        self.qkv, self.out = (nn.Linear(HIDDEN, width * HIDDEN, bias=False) for width in (3, 1))
        self.gate, self.up = (nn.Linear(HIDDEN, INTERMEDIATE, bias=False) for _ in range(2))
        self.down = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, tokens, 3, TOKEN_HEADS, -1)
        query, key, value = (each.transpose(1, 2) for each in qkv.unbind(2))
        attended = F.scaled_dot_product_attention(
            _rotated(query, cos, sin), _rotated(key, cos, sin), value, is_causal=True
        )
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, HIDDEN))
        normed = self.norms[1](x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Layers(nn.Module):
    """A stack of `DecoderLayer`."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = x.shape[1], HIDDEN // TOKEN_HEADS // 2
        cos, sin = (torch.ones(shape, dtype=x.dtype, device=x.device) for _ in range(2))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    one, other = x.chunk(2, -1)
    return torch.cat((one * cos - other * sin, one * sin + other * cos), -1)
