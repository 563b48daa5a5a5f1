"""One rank of several: the costs of collectives, and waits for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from memplug.errors import HardwareError
from memplug.predict.virtual import VirtualDevice
from memplug.predict.virtual.ranks import joined
from memplug.session.ranks import Ranks
from tests.support.virtual_devices import MIB, SIMPLE, on_device, seconds

RANKS, RANK = 4, 1
LATENCY_S, BYTES_PER_S = SIMPLE.collective_s, SIMPLE.collective_bytes_per_s


@pytest.fixture(autouse=True)
def rank(device: VirtualDevice) -> Iterator[None]:
    """Make this process one of four ranks."""
    with joined(RANK, RANKS):
        yield


def _parts(nbytes: int = MIB // RANKS) -> list[torch.Tensor]:
    return [on_device(nbytes) for _ in range(RANKS)]


COLLECTIVES: dict[str, tuple[Callable[[], object], float]] = {
    "all_reduce": (lambda: dist.all_reduce(on_device(MIB)), 1.5),
    "all_gather": (lambda: dist.all_gather(_parts(), on_device(MIB // RANKS)), 0.75),
    "all_gather_into_tensor": (lambda: dist.all_gather_into_tensor(on_device(MIB), on_device(MIB // RANKS)), 0.75),
    "reduce_scatter": (lambda: dist.reduce_scatter(on_device(MIB // RANKS), _parts()), 0.75),
    "reduce_scatter_tensor": (lambda: dist.reduce_scatter_tensor(on_device(MIB // RANKS), on_device(MIB)), 0.75),
    "all_to_all": (lambda: dist.all_to_all(_parts(), _parts()), 0.75),
    "all_to_all_single": (lambda: dist.all_to_all_single(on_device(MIB), on_device(MIB)), 0.75),
    "broadcast": (lambda: dist.broadcast(on_device(MIB), 0), 1.0),
    "reduce": (lambda: dist.reduce(on_device(MIB), 0), 1.0),
    "gather": (lambda: dist.gather(on_device(MIB // RANKS), _parts(), RANK), 0.75),
    "scatter": (lambda: dist.scatter(on_device(MIB // RANKS), _parts(), RANK), 0.75),
    "send": (lambda: dist.send(on_device(MIB), 2), 1.0),
    "recv": (lambda: dist.recv(on_device(MIB), 0), 1.0),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collective_takes_the_time_of_a_ring_algorithm(device: VirtualDevice, name: str) -> None:
    run, share = COLLECTIVES[name]
    began = seconds(device)
    run()
    assert seconds(device) - began == pytest.approx(LATENCY_S + share * MIB / BYTES_PER_S, rel=1e-3)


def test_collective_time_counts_the_groups_ranks_and_is_0_for_one_rank(device: VirtualDevice) -> None:
    pair, alone = dist.new_group([1, 3]), dist.new_group([RANK])
    assert dist.get_rank(pair) == 0 and dist.get_world_size(pair) == 2
    assert dist.new_group([0, 2]) is dist.GroupMember.NON_GROUP_MEMBER
    began = seconds(device)
    dist.all_reduce(on_device(MIB), group=pair)
    assert seconds(device) - began == pytest.approx(LATENCY_S + MIB / BYTES_PER_S, rel=1e-3)
    began = seconds(device)
    dist.all_reduce(on_device(MIB), group=alone)
    assert seconds(device) - began < 1e-6


def test_computation_overlaps_a_collective_until_its_wait(device: VirtualDevice) -> None:
    shared, other = on_device(MIB), on_device(300 * MIB)
    added_s = 2 * other.numel() / SIMPLE.memory_bytes_per_s
    moved_s = LATENCY_S + 1.5 * MIB / BYTES_PER_S
    began = seconds(device)
    work = dist.all_reduce(shared, async_op=True)
    other.add_(1)
    assert seconds(device) - began == pytest.approx(max(added_s, moved_s), rel=1e-3)
    began = seconds(device)
    work = dist.all_reduce(shared, async_op=True)
    work.wait()
    other.add_(1)
    assert seconds(device) - began == pytest.approx(added_s + moved_s, rel=1e-3)


def test_collectives_of_all_groups_share_the_links(device: VirtualDevice) -> None:
    pair = dist.new_group([1, 3])
    began = seconds(device)
    works = [dist.all_reduce(on_device(MIB), async_op=True), dist.all_reduce(on_device(MIB), group=pair, async_op=True)]
    assert all(work.wait() for work in works)
    assert seconds(device) - began == pytest.approx(2 * LATENCY_S + 2.5 * MIB / BYTES_PER_S, rel=1e-3)


def test_collective_keeps_its_memory_until_its_wait(device: VirtualDevice) -> None:
    before = device.usage().allocated
    work = dist.all_reduce(on_device(MIB), async_op=True)
    assert device.usage().allocated == before + MIB
    work.wait()
    assert device.usage().allocated == before


def test_one_wait_covers_all_coalesced_collectives(device: VirtualDevice) -> None:
    outputs, inputs = [on_device(MIB) for _ in range(2)], [on_device(MIB // RANKS) for _ in range(2)]
    began = seconds(device)
    with dist._coalescing_manager(device=torch.device("virtual"), async_ops=True) as manager:
        for output, own in zip(outputs, inputs, strict=True):
            dist.all_gather_into_tensor(output, own)
    manager.wait()
    outputs[0].add_(1)
    added_s = 2 * MIB / SIMPLE.memory_bytes_per_s
    assert seconds(device) - began == pytest.approx(LATENCY_S + 1.5 * MIB / BYTES_PER_S + added_s, rel=1e-3)


def test_cpu_collectives_return_this_ranks_values_for_every_rank() -> None:
    found: list[object] = [None] * RANKS
    dist.all_gather_object(found, {"rank": RANK})
    assert found == [{"rank": RANK}] * RANKS
    assert Ranks().vote(0b101)() == 0b101 and Ranks().gather("plan") == ["plan"] * RANKS
    assert dist.new_group(backend="gloo").size() == RANKS


@pytest.mark.parametrize("which", [-1, RANKS])
def test_rank_out_of_range_is_refused(which: int) -> None:
    with pytest.raises(HardwareError, match=f"no rank {which} of {RANKS}"), joined(which, RANKS):
        pass
