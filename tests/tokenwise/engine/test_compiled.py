"""Functions that a model compiles inside of a region; compiled code has no operators to observe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import memplug
from tests.support.blocks import Layer, Stack, assert_same, gradients, tokenwise, twin

pytestmark = pytest.mark.device


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_functions_compiled_inside_a_region_run_uncompiled(alpha):
    compiled_calls = 0

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            nonlocal compiled_calls
            compiled_calls += 1
            return graph.forward(*args)

        return run

    @torch.compile(backend=backend)
    def activation(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * x.sigmoid()

    class Compiles(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.out(activation(self.inner(self.norm(x))))

    torch.manual_seed(0)
    model = Stack(2, Compiles)
    reference = twin(model)
    executor = tokenwise(model, alpha)
    for x in torch.randn(3, 2, 6, 16):
        reference(x).backward()
        before = compiled_calls
        model(x).backward()
        assert compiled_calls == before > 0, "the function ran compiled outside the regions only"
        assert_same(gradients(model), gradients(reference))
    assert executor.opaque_regions == 0
    torch.compiler.reset()


@pytest.mark.cpu("the kernels of Triton are not simulated")
@pytest.mark.parametrize("tokenwise", [{"regions": ["layers.*"], "min_offload_bytes": 1}, {"enabled": False}])
def test_compiled_model_trains_exactly_and_without_compiler_warnings(tokenwise, recwarn):
    """Hooks that mark places in the program must stay out of compiled code."""
    torch.manual_seed(0)
    model = Stack(3)
    reference = twin(model)
    quick = {"warmup_steps": 0, "policy_steps": 0}
    with memplug.attach(model, {"enabled": True, "tokenwise": tokenwise, "profiler": quick}) as session:
        compiled = torch.compile(model, backend="eager")
        for x in torch.randn(10, 2, 6, 16):
            compiled(x).backward()
            reference(x).backward()
            assert_same(gradients(model), gradients(reference))
            session.step()
        assert session.report().arena.served > 0
    assert not [warning for warning in recwarn if "memplug" in str(warning.message)]
    torch.compiler.reset()
