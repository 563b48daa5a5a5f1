"""A swap list on two streams.

A storage that was offloaded and prefetched is ready for whichever stream reads it next. Both its former memory and its
new memory are reused only after all streams have finished with it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memplug
from memplug import native
from memplug.device.device import device_of
from memplug.device.host_pool import HostPool
from tests.cudasim import device
from tests.cudasim.device import SCHEDULES, Schedule, scheduled
from tests.support.swapped import GIB, block

pytestmark = pytest.mark.gpu

ORDERS = [*SCHEDULES, Schedule("random", 1)]
SLAB_BYTES = 1 << 20
COUNT = 4096


@pytest.fixture(params=ORDERS, ids=str, autouse=True)
def ordered(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run under each schedule, and check that no access is unordered."""
    before = device.violations()
    with scheduled(request.param):
        yield
        torch.cuda.synchronize()
    assert device.violations() == before


@pytest.fixture
def swapper() -> Iterator[Any]:
    """Yield the active swapper of an empty swap list, which sees all operators; tests choose the transfers."""
    core, own = native.load(), device_of(torch.device("cuda"))
    pool = HostPool(own, SLAB_BYTES, core)
    pool.reserve(SLAB_BYTES)
    swapper = core.StorageSwapper(own.streams(core), pool.slabs[0])
    core.load_swap_list([], [], b"", b"", b"", 1, [], swapper, core.device_type("cuda"))
    core.begin_swap_step()
    yield swapper
    assert core.end_swap_step()
    core.unload_swap_list()
    pool.close()


def sample(seed: int) -> torch.Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(seed)).cuda()


def away(swapper: Any, tensor: torch.Tensor, key: int) -> None:
    assert swapper.offload(tensor, key)
    swapper.release(key)


def test_side_stream_waits_for_storages_restored_on_the_main_stream(swapper: Any) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    weights, found = [sample(seed) for seed in range(4)], []
    with torch.cuda.stream(side):
        torch.ones(1, device="cuda")
    side.wait_stream(main)  # once, for all writes: no weight is written to later
    for _ in range(3):
        for key, weight in enumerate(weights):
            away(swapper, weight, key)
        for key in range(0, 4, 2):
            swapper.prefetch(key)
        for weight in weights:
            one = weight * 2
            with torch.cuda.stream(side):
                other = weight * 3
            found.append((one, other))
        main.wait_stream(side)
    for index, (one, other) in enumerate(found):
        expected = sample(index % 4)
        assert torch.equal(one, expected * 2) and torch.equal(other, expected * 3)


def test_main_stream_waits_for_storages_restored_on_a_side_stream(swapper: Any) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    weight, found = sample(0), []
    for _ in range(3):
        side.wait_stream(main)
        with torch.cuda.stream(side):
            away(swapper, weight, 1)
            other = weight * 3
        found.append((weight * 2, other))
        main.wait_stream(side)
    for one, other in found:
        assert torch.equal(one, sample(0) * 2) and torch.equal(other, sample(0) * 3)


def test_memory_of_a_restored_storage_is_reused_after_its_last_reader(swapper: Any) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    for seed in range(4):
        tensor = sample(seed)
        tensor.record_stream(side)
        away(swapper, tensor, seed)
        tensor + 1  # a use, which restores the tensor
        side.wait_stream(main)
        with torch.cuda.stream(side):
            found = tensor.sin().cos()
        del tensor
        torch.zeros(COUNT, device="cuda")  # gets the tensor's memory if that is free
        main.wait_stream(side)
        assert torch.equal(found, sample(seed).sin().cos())


def test_memory_that_a_storage_left_is_reused_after_its_last_reader(swapper: Any) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    weight = sample(0)
    for _ in range(4):
        side.wait_stream(main)
        with torch.cuda.stream(side):
            found = weight.sin().cos()
        away(swapper, weight, 1)
        torch.zeros(COUNT, device="cuda")
        main.wait_stream(side)
        assert torch.equal(found, sample(0).sin().cos())
        swapper.restore(1)


def test_storage_restored_between_steps_is_ready_for_a_side_stream(swapper: Any) -> None:
    core, side = native.load(), torch.cuda.Stream()
    weight = sample(0)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        weight * 2
    away(swapper, weight, 1)
    assert core.end_swap_step()
    with torch.cuda.stream(side):
        found = weight * 3
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(found, sample(0) * 3)
    core.begin_swap_step()


class Reading(nn.Module):
    """In its backward the main stream reads a tensor first; the other stream reads it without waiting for the main."""

    def __init__(self, side: torch.cuda.Stream):
        super().__init__()
        self.lin, self.side = nn.Linear(32, 32), side

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        main, hidden = torch.cuda.current_stream(), self.lin(x)
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            z = hidden.sin()
        hidden.record_stream(self.side)
        y = hidden.cos()
        main.wait_stream(self.side)
        z.record_stream(main)
        return x + y * z


def train(swaps: bool) -> tuple[list[torch.Tensor], dict[str, Any]]:
    torch.manual_seed(0)
    gc.collect()
    torch.cuda.synchronize()
    there_bytes, side = torch.cuda.memory_allocated(), torch.cuda.Stream()
    model = nn.Sequential(*(Reading(side) for _ in range(8))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = memplug.attach(model, block((there_bytes + 700_000) / GIB)) if swaps else None
    losses, report = [], {}
    for step in range(14):
        x = torch.randn(256, 32, generator=torch.Generator().manual_seed(step)).cuda()
        loss = F.mse_loss(model(x), torch.zeros_like(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
        del loss, x
        if session is not None:
            session.step()
    torch.cuda.synchronize()
    if session is not None:
        report = session.report().as_dict()
        session.detach()
    return [value.cpu() for value in [*losses, *model.parameters()]], report


def test_training_on_two_streams_swaps_bit_identically() -> None:
    expected, _ = train(swaps=False)
    found, report = train(swaps=True)
    assert all(map(torch.equal, found, expected))
    assert report["swap_released_bytes"] > 0 and report["swap_repeated"] == 0
