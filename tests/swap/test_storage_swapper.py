"""Offloaded and prefetched storages always have the values of the last write."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from memplug import native
from memplug.device.device import Device, device_of
from memplug.device.host_pool import HostPool

pytestmark = pytest.mark.device

SLAB_BYTES = 1 << 20


@pytest.fixture
def pool() -> Iterator[HostPool]:
    pool = HostPool(this_device(), SLAB_BYTES, native.load())
    pool.reserve(SLAB_BYTES)
    yield pool
    pool.close()


@pytest.fixture
def swapper(pool: HostPool) -> Iterator[Any]:
    core = native.load()
    swapper = core.StorageSwapper(this_device().streams(core), pool.slabs[0])
    yield swapper
    assert swapper.restore_all()
    assert swapper.host_bytes == 0


def this_device() -> Device:
    return device_of(torch.get_default_device())


def sample(seed: int = 0, count: int = 1000) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to(
        torch.get_default_device(), copy=True
    )


def away(swapper: Any, tensor: torch.Tensor, key: int = 1) -> None:
    assert swapper.offload(tensor, key)
    swapper.release(key)


def test_waits_for_copies_are_measured_only_if_enabled(swapper: Any) -> None:
    tensor = sample()

    def waited_s(measured: bool) -> float:
        swapper.measure(measured)
        away(swapper, tensor)
        swapper.restore(1)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        return swapper.waited_s()

    assert waited_s(False) == 0
    seconds = waited_s(True)
    assert 0 < seconds < 10 and waited_s(False) == seconds, "the last measurement is kept"
    swapper.measure(True)
    assert swapper.waited_s() == 0


def test_offloaded_storage_is_restored_unchanged(swapper: Any) -> None:
    tensor, before = sample(), sample()
    away(swapper, tensor)
    assert swapper.host_bytes == 4096
    swapper.prefetch(1)
    swapper.restore(1)
    assert swapper.host_bytes == 0
    assert torch.equal(tensor, before)
    counters = swapper.counters
    assert counters["released_bytes"] == counters["prefetched_bytes"] == 4000
    assert counters["demanded"] == counters["cancelled"] == counters["refused"] == 0


def test_operators_read_the_values_of_offloaded_storage(swapper: Any) -> None:
    tensor, before = sample(), sample()
    away(swapper, tensor)
    assert torch.equal(tensor + 1, before + 1)
    assert torch.equal(tensor[10:20].clone(), before[10:20])


WRITES = {
    "in place": lambda tensor: tensor.add_(1),
    "a view": lambda tensor: tensor[100:].mul_(2),
    "an alias with another version": lambda tensor: tensor.data.mul_(3),
    "a copy into it": lambda tensor: tensor.copy_(torch.arange(1000.0)),
    "an output": lambda tensor: torch.mul(tensor.clone(), 5, out=tensor),
    "zeros": lambda tensor: tensor.zero_(),
}


@pytest.mark.parametrize("when", ["leaving", "away", "returning"])
@pytest.mark.parametrize("write", WRITES)
def test_write_to_a_storage_in_transfer_is_not_lost(swapper: Any, write: str, when: str) -> None:
    tensor, expected = sample(), sample()
    assert swapper.offload(tensor, 1)
    if when != "leaving":
        swapper.release(1)
    if when == "returning":
        swapper.prefetch(1)
    WRITES[write](tensor)
    WRITES[write](expected)
    for step in (swapper.release, swapper.prefetch, swapper.restore):
        step(1)
    assert torch.equal(tensor, expected)
    counters = swapper.counters
    assert counters["cancelled"] == (when == "leaving") and counters["demanded"] == (when != "leaving")


@pytest.mark.parametrize("when", ["leaving", "away", "returning"])
def test_freeing_a_storage_in_transfer_frees_its_host_memory(swapper: Any, when: str) -> None:
    tensor = sample()
    assert swapper.offload(tensor, 1)
    if when != "leaving":
        swapper.release(1)
    if when == "returning":
        swapper.prefetch(1)
    del tensor
    for step in (swapper.release, swapper.prefetch, swapper.restore):
        step(1)
    other, before = sample(1), sample(1)
    away(swapper, other, 2)
    swapper.restore(2)
    assert torch.equal(other, before)
    assert swapper.host_bytes == 0


@pytest.mark.cpu("torch copies resized storages as device memory; an observed resize restores them first")
@pytest.mark.parametrize("when", ["leaving", "away", "returning"])
def test_storage_resized_in_transfer_keeps_its_values(swapper: Any, when: str) -> None:
    tensor, before = sample(), sample()
    assert swapper.offload(tensor, 1)
    if when != "leaving":
        swapper.release(1)
    if when == "returning":
        swapper.prefetch(1)
    tensor.resize_(3000)
    tensor[1000:] = 7
    for step in (swapper.release, swapper.prefetch, swapper.restore):
        step(1)
    assert torch.equal(tensor[:1000], before) and bool((tensor[1000:] == 7).all())


def test_offload_is_refused_if_host_memory_is_full(swapper: Any) -> None:
    large, small = torch.zeros(SLAB_BYTES // 4), sample()
    away(swapper, large)
    assert not swapper.offload(small, 2)
    assert swapper.counters["refused"] == 1
    swapper.restore(1)
    assert swapper.offload(small, 2)


def test_memory_of_other_allocators_is_not_offloaded(swapper: Any) -> None:
    tensor = torch.from_dlpack(sample()) if torch.get_default_device().type == "cpu" else torch.empty(0)
    assert not swapper.offload(tensor, 1)
    assert not swapper.offload(torch.empty(0), 2)


def test_offloaded_storage_keeps_its_values_after_its_swapper_dies(pool: HostPool) -> None:
    core = native.load()
    swapper = core.StorageSwapper(this_device().streams(core), pool.slabs[0])
    tensor, before = sample(), sample()
    away(swapper, tensor)
    del swapper
    gc.collect()
    tensor.add_(1)
    assert torch.equal(tensor, before + 1)
    del tensor


def test_autograd_reads_offloaded_storages(swapper: Any) -> None:
    """Compare views and several graphs; a write that autograd refuses must still raise."""
    weight = sample(2).requires_grad_()
    graphs = []
    for seed in range(3):
        hidden = (weight * seed).exp()
        graphs.append((hidden, hidden[:500].square().sum() + hidden.sin().sum()))
        away(swapper, hidden.detach(), seed)
    for seed, (_, loss) in reversed(list(enumerate(graphs))):
        if seed:
            swapper.prefetch(seed)
        loss.backward()
    plain = sample(2).requires_grad_()
    for seed in (2, 1, 0):
        hidden = (plain * seed).exp()
        (hidden[:500].square().sum() + hidden.sin().sum()).backward()
    assert torch.equal(weight.grad, plain.grad)
    swapper.restore_all()
    hidden = (weight * 2).exp()
    loss = hidden.sum()
    away(swapper, hidden.detach(), 9)
    hidden.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.gpu
def test_offloaded_values_are_correct_on_another_stream(swapper: Any) -> None:
    tensor, before = sample(), sample()
    away(swapper, tensor)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        swapper.prefetch(1)  # does nothing on a side stream
        assert swapper.counters["prefetches"] == 0
        doubled = tensor * 2
        tensor.mul_(3)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(doubled, before * 2) and torch.equal(tensor, before * 3)


def test_release_leaving_releases_every_storage_being_offloaded(swapper: Any) -> None:
    tensors = [sample(seed) for seed in range(3)]
    for key, tensor in enumerate(tensors[:2]):
        assert swapper.offload(tensor, key)
    assert swapper.release_leaving() == 8000 and swapper.release_leaving() == 0
    for key, tensor in enumerate(tensors):
        swapper.restore(key)
        assert torch.equal(tensor, sample(key))
    assert swapper.counters["demanded"] == swapper.counters["passive"] == 0


def test_storage_offloaded_for_a_failed_request_is_restored_on_use(swapper: Any) -> None:
    tensor, before = sample(), sample()
    assert swapper.leave_now(tensor) == 4000 and swapper.leave_now(tensor) == 0
    assert swapper.host_bytes == 4096
    swapper.use(tensor)
    assert swapper.host_bytes == 0 and torch.equal(tensor, before)
    assert swapper.leave_now(tensor) == 4000
    tensor.add_(1)
    assert swapper.host_bytes == 0 and torch.equal(tensor, before + 1)
    counters = swapper.counters
    assert (counters["passive"], counters["passive_bytes"]) == (2, 8000)
    assert counters["offloads"] == counters["releases"] == counters["prefetches"] == counters["demanded"] == 0


def test_turn_back_cancels_the_last_prefetch(swapper: Any) -> None:
    tensors = [sample(seed) for seed in range(2)]
    for key, tensor in enumerate(tensors):
        away(swapper, tensor, key)
        swapper.prefetch(key)
    assert swapper.turn_back() == 4000
    swapper.restore(0)
    assert swapper.host_bytes == 4096 and swapper.turn_back() == 0
    assert torch.equal(tensors[1] * 2, sample(1) * 2)
    swapper.restore(1)
    assert swapper.host_bytes == 0 and torch.equal(tensors[1], sample(1)) and torch.equal(tensors[0], sample(0))


def test_offloads_for_failed_requests_use_limited_host_memory() -> None:
    core = native.load()
    swapper = core.StorageSwapper(this_device().streams(core), passive_bytes=10_000)
    tensors = [sample(seed) for seed in range(3)]
    assert [swapper.leave_now(tensor) for tensor in tensors] == [4000, 4000, 0]
    assert swapper.counters["refused"] == 1 and swapper.host_bytes == 8192
    assert swapper.restore_all()
    assert all(torch.equal(tensor, sample(seed)) for seed, tensor in enumerate(tensors))


BY_KEY, OF_ALL = ("release", "prefetch", "restore"), ("turn_back", "release_leaving")
CHANGES = {
    "write": lambda tensor: tensor.add_(7),
    "view": lambda tensor: tensor.view(-1)[3:50].mul_(0.5),
    "data": lambda tensor: tensor.data.sub_(1),
}


@pytest.mark.parametrize("seed", range(30))
def test_random_sequences_of_transfers_and_writes_lose_no_value(swapper: Any, seed: int) -> None:
    chance = random.Random(seed)
    tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    keys = {}
    for number in range(300):
        which = chance.randrange(4)
        if which not in tensors:
            tensors[which] = sample(number, 200 + which), sample(number, 200 + which)
        tensor, twin = tensors[which]
        kind = chance.choice([*("offload", "leave_now", "read", "drop"), *BY_KEY, *OF_ALL, *CHANGES])
        if kind == "leave_now":
            swapper.leave_now(tensor)
        elif kind in OF_ALL:
            getattr(swapper, kind)()
        elif kind == "offload" and swapper.offload(tensor, number):
            keys[which] = number
        elif kind in BY_KEY and which in keys:
            getattr(swapper, kind)(keys[which])
        elif kind == "read":
            assert torch.equal(tensor * 2, twin * 2)
        elif kind in CHANGES:
            CHANGES[kind](tensor), CHANGES[kind](twin)
        elif kind == "drop":
            del tensors[which], tensor, twin
            keys.pop(which, None)
    swapper.restore_all()
    for tensor, twin in tensors.values():
        assert torch.equal(tensor, twin)
