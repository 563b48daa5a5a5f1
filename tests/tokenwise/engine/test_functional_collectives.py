"""Functional collectives in place, as FSDP2 and Megatron-Core's newer layers call them; their wait is an operator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.blocks import Layer, Stack, assert_clean, assert_same, gradients, tokenwise, twin
from tests.support.counting import Launches
from tests.support.reducing import WHOLE, ReducesMemoryThatWasThere, reducing


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    """Make a group of this process alone."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("reads_before", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_in_place_functional_reduction_is_not_launched_again(alpha: float, reads_before: bool) -> None:
    assert functional_launches(reducing(WHOLE, reads_before=reads_before), alpha) == 0


@pytest.mark.parametrize("parts", [(slice(1),), (slice(1), slice(1, None)), (WHOLE, slice(1))])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_all_reduce_of_a_slice_is_launched_again(alpha: float, parts: tuple[slice, ...]) -> None:
    assert functional_launches(reducing(*parts), alpha) == 3 * 4 * sum(part != WHOLE for part in parts)


def test_reduction_read_before_its_wait_is_launched_again() -> None:
    class ReadsEarly(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(self.norm(x)).detach()
            functional = torch.ops._c10d_functional
            launched = functional.all_reduce_(y, "sum", dist.group.WORLD.group_name)
            early = y.exp()
            functional.wait_tensor(launched)
            return x + self.out(self.inner(x).sigmoid() * early * y)

    assert functional_launches(ReadsEarly, 0.0) == 3 * 4


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_reduction_into_existing_memory_is_launched_again(alpha: float) -> None:
    assert functional_launches(ReducesMemoryThatWasThere, alpha) == 3 * 4


def _is_reduction(func: Any) -> bool:
    return func is torch.ops._c10d_functional.all_reduce_.default


def functional_launches(layer: type[Layer], alpha: float) -> int:
    """Return the in-place reductions that backward launched in four steps, after comparing gradients."""
    torch.manual_seed(0)
    model = Stack(3, layer)
    reference = twin(model)
    executor, launches = tokenwise(model, alpha), Launches(_is_reduction)
    for x in torch.randn(4, 2, 6, 16):
        loss = model(x)
        with launches:
            loss.backward()
        reference(x).backward()
        assert_same(gradients(model), gradients(reference), exact=alpha in (0, 1))
        del loss
    assert not executor.opaque
    assert_clean(executor)
    return launches.calls.total()
