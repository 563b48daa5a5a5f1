"""Patterns of `tokenwise.regions` name modules as the model was written, whatever wraps the model or its parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import memplug
from memplug.errors import ConflictError
from memplug.hooks.regions import matching_modules
from tests.support.blocks import Stack, assert_same, gradients
from tests.support.hosts import block


class Wraps(nn.Module):
    """A wrapper like DistributedDataParallel and Megatron-Core's Float16Module."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.module(*args)


class FullySharded(nn.Module):
    """A wrapper like FullyShardedDataParallel."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self._fsdp_wrapped_module = module

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self._fsdp_wrapped_module(*args)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the stack's own layers, under any wrappers."""
    return [module for name, module in model.named_modules() if type(module).__name__ == "Block"]


def wrapped(how: str) -> nn.Module:
    torch.manual_seed(0)
    stack = Stack(3)
    match how:
        case "module.":
            return Wraps(stack)
        case "module.module.":
            return Wraps(Wraps(stack))
        case "_orig_mod.":
            return torch.compile(stack, backend="eager")
        case "_fsdp_wrapped_module.":
            for index in range(3):
                stack.layers[index] = FullySharded(stack.layers[index])
        case "_checkpoint_wrapped_module.":
            for index in range(3):
                stack.layers[index] = checkpoint_wrapper(stack.layers[index])
    return stack


HOWS = ["module.", "module.module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."]


@pytest.mark.parametrize("how", HOWS)
def test_pattern_without_wrapper_prefix_matches_the_wrapped_module(how: str) -> None:
    model = wrapped(how)
    found, missing = matching_modules(model, ["layers.*"])
    assert not missing
    assert [module for _, module in found] == layers_of(model)
    named = dict(model.named_modules())
    assert all(named[name] is module for name, module in found), "matches have their names in the wrapped model"
    spelt_out = ["*." * name.count(".") + "*" for name, _ in found[:1]] if how == "_fsdp_wrapped_module." else None
    assert spelt_out is None or matching_modules(model, [found[0][0]])[0] == found[:1], "the full name matches too"


@pytest.mark.parametrize("how", HOWS)
def test_wrapped_layers_have_the_gradients_of_plain_ones(how: str) -> None:
    model = wrapped(how)
    torch.manual_seed(0)
    plain = Stack(3)
    x = torch.randn(2, 6, 16)
    plain(x).backward()
    with memplug.attach(model, block(alpha=1, regions=["layers.*"])) as session:
        model(x).backward()
        assert session.report().tokenwise.regions == session.report().tokenwise.forwards == 3
    assert_same(
        {name.replace(how, ""): gradient for name, gradient in gradients(model).items()}, gradients(plain), exact=True
    )
    torch._dynamo.reset()


def test_module_with_several_children_does_not_count_as_a_wrapper() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.other = nn.Linear(2, 2), nn.Linear(2, 2)

    model = nn.Sequential(Two())
    assert [name for name, _ in matching_modules(model, ["0.module"])[0]] == ["0.module"]
    assert [name for name, _ in matching_modules(model, ["0.*"])[0]] == ["0.module", "0.other"]


@pytest.mark.parametrize("pattern", ["layers.*", "layers.1", "layers.*._orig_mod"])
def test_pattern_that_names_a_compiled_region_is_refused(pattern: str) -> None:
    model = Stack(2)
    model.layers[1] = torch.compile(model.layers[1], backend="eager")
    with pytest.raises(ConflictError, match=r"layers\.1 is compiled") as error:
        memplug.attach(model, block(alpha=1, regions=[pattern]))
    assert "do not compile the regions" in error.value.advice
