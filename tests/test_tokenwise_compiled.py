"""Functions that a model compiles inside of a region: compiled code has no operators to see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.blocks import Layer, Stack, assert_same, gradients, tokenwise, twin


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_functions_compiled_inside_of_a_region_run_as_they_are_written(alpha):
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
        assert compiled_calls == before > 0, "it is compiled already, outside of the regions"
        assert_same(gradients(model), gradients(reference))
    assert executor.opaque_regions == 0
    torch.compiler.reset()
