"""Layers with FlexAttention, compilers that count, and trainings with memplug that are compared with plain torch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import lookup_backend
from torch.nn.attention import flex_attention as flex

import memplug
from tests.support.blocks import LAYERS, assert_clean, assert_same, gradients, twin

WIDTH, HEADS, TOKENS, LAYER_COUNT = 32, 4, 128, 3


class Counted:
    """A compiler that counts the graphs that it compiles, and the calls of the compiled functions."""

    def __init__(self, backend: str = "aot_eager"):
        self.backend, self.graphs, self.calls = lookup_backend(backend), 0, 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        made = self.backend(graph, inputs)

        def run(*args: Any) -> Any:
            self.calls += 1
            return made(*args)

        return run


class SavesMore(Counted):
    """A compiler whose function saves one more tensor for backward in some calls, with the same result."""

    def __init__(self, when: Callable[[int], bool]):
        super().__init__()
        self.when = when

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        made = super().__call__(graph, inputs)

        def run(*args: Any) -> Any:
            more = self.when(self.calls)
            out, *others = made(*args)
            return (out * torch.ones(()) if more else out, *others)

        return run


def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """Return the causal mask."""
    return query >= key


@functools.cache
def mask_of(tokens: int, device: torch.device) -> flex.BlockMask:
    """Return the causal mask for sequences of that length."""
    return flex.create_block_mask(causal, None, None, tokens, tokens, device=device)


class Attends(nn.Module):
    """FlexAttention with a residual around it."""

    attention = staticmethod(flex.flex_attention)

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2).contiguous() for y in self.qkv(x).chunk(3, -1))
        return x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(-2))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Run attention on tensors that are split into heads."""
        return self.attention(q, k, v, block_mask=mask_of(q.shape[-2], q.device))


class Biased(Attends):
    """A layer whose scores depend, by closure alone, on a parameter and on an earlier result of the region."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(HEADS))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        slopes, norms = self.bias, k.square().mean(-1)

        def score(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
            return score * norms[batch, head, key] + slopes[head]

        return self.attention(q, k, v, score, mask_of(q.shape[-2], q.device))


class Frozen(Attends):
    """A layer without a gradient through its attention."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return super().attend(q.detach(), k.detach(), v.detach()) * v


class Opaque(Attends):
    """A layer that is opaque, since it takes an address outside of its attention."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        out.data_ptr()
        return out.sigmoid()


class Model(nn.Module):
    """Layers in a row, and a loss."""

    def __init__(self, layer: type[nn.Module] = Attends) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer() for _ in range(LAYER_COUNT)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask_of(x.shape[-2], x.device)  # made outside of the regions
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def block(alpha: float | str, **others: Any) -> dict[str, Any]:
    """Return a memplug block that swaps the layers with this alpha."""
    tokenwise = {"regions": LAYERS, "alpha": alpha, "min_offload_bytes": 256}
    return {"enabled": True, "plan_dir": False, "arena": {"enabled": False}, "tokenwise": tokenwise, **others}


def compile_with(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `Attends` layers call FlexAttention compiled by this back end, the same function in all models."""
    monkeypatch.setattr(Attends, "attention", staticmethod(torch.compile(flex.flex_attention, backend=backend)))


def trained(
    alpha: float | str,
    layer: type[nn.Module] = Attends,
    lengths: tuple[int, ...] = 4 * (TOKENS,),
    counted: Counted | None = None,
    around: Callable[[], Any] = contextlib.nullcontext,
    **others: Any,
) -> dict[str, Any]:
    """Train with memplug, compare the gradients with plain torch's, and return the report.

    The added field "compiled" has two counts for each step: graphs compiled for memplug's model, and runs of its
    compiled attention.
    """
    torch.manual_seed(0)
    model = Model(layer)
    reference = twin(model)
    compiled: list[tuple[int, int]] = []
    with memplug.attach(model, block(alpha, **others)) as session:
        for tokens in lengths:
            x = torch.randn(2, tokens, WIDTH)
            with around():
                loss = reference(x * 1.0)
            loss.backward()
            before = (counted.graphs, counted.calls) if counted else (0, 0)
            with around():
                loss = model(x * 1.0)
            loss.backward()
            if counted:
                compiled.append((counted.graphs - before[0], counted.calls - before[1]))
            assert_same(gradients(model), gradients(reference))
            session.step()
        del loss
        assert_clean(session._attached.executor)
        return {**session.report().as_dict(), "compiled": compiled}
