"""The planned arena on a CUDA device: losses, and the interface of torch's allocator."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import memplug
from memplug import native
from memplug.arena.technique import ArenaState
from tests.support.serving import ALONE, CHECKED, llama, nothing_leaks, owned, serving_of

pytestmark = pytest.mark.gpu

SWAPPED = {"enabled": True, "plan_dir": False, "tokenwise": {"alpha": 1, "min_offload_bytes": 1}}

WATCHING = {**ALONE, "arena": {"enabled": False}, "swap": {"enabled": True}}
"""Configures a swap list, which after two steps still observes whether a step fits without swapping."""


def batch() -> torch.Tensor:
    return torch.randint(0, 64, (2, 16), device="cuda")


def step(model: nn.Module) -> float:
    tokens = batch()
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    return loss.item()


@pytest.fixture
def session() -> Iterator[memplug.Session]:
    """Yield a session whose arena serves; add its model as `session.model`."""
    torch.manual_seed(0)
    model = llama().cuda()
    with nothing_leaks(), memplug.attach(model, ALONE) as session:
        for _ in range(8):
            step(model)
            model.zero_grad()
            session.step()
        assert serving_of(session).state is ArenaState.SERVING
        session.model = model
        yield session
        model.zero_grad()  # gradients would keep the arena alive
        del session.model


@pytest.mark.parametrize("block", [ALONE, CHECKED, SWAPPED], ids=["alone", "checked", "swapped"])
def test_arena_serves_nearly_all_requests_with_unchanged_losses(block: dict) -> None:
    runs = []
    for used in ({"enabled": False}, block):
        torch.manual_seed(0)
        model = llama().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        with memplug.attach(model, used) as session:
            for _ in range(20):
                losses.append(step(model))
                optimizer.step()
                optimizer.zero_grad()
                session.step()
            report = session.report().arena
        runs.append(losses)
    assert runs[1] == pytest.approx(runs[0], rel=1e-5)
    assert report.served > 1000 and report.served > 1000 * report.fallback


def test_memory_allocated_counts_arena_blocks_not_the_whole_arena(session: memplug.Session) -> None:
    step(session.model)
    session.model.zero_grad()
    torch.cuda.synchronize()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    block = torch.empty(3 * 2**20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() - before == 3 * 2**20
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
    del block
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.memory_reserved() >= reserved >= session.report().arena.bytes
    torch.cuda.memory_summary()
    torch.cuda.memory_snapshot()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > 0
    step(session.model)


def test_block_is_reused_only_after_another_stream_has_read_it(session: memplug.Session) -> None:
    side = torch.cuda.Stream()
    with torch.no_grad():
        for round in range(20):
            block = torch.full((2**20,), float(round), device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(2_000_000)
                read = block.clone()
            block.record_stream(side)
            del block
            torch.full((2**20,), -1.0, device="cuda")
            torch.cuda.synchronize()
            assert (read == round).all()


def test_cuda_graph_uses_memory_outside_the_arena(session: memplug.Session) -> None:
    static = torch.zeros(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = static * 2 + 1
    assert not owned(out)
    static.fill_(3)
    graph.replay()
    step(session.model)
    torch.cuda.synchronize()
    assert (out == 7).all()


def test_tensors_of_a_user_memory_pool_are_outside_the_arena(session: memplug.Session) -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = torch.ones(1000, device="cuda")
    assert not owned(inside) and (inside == 1).all()


def test_peak_reset_while_memplug_is_uninstalled_survives_reinstalling(session: memplug.Session) -> None:
    session.model.zero_grad()
    session.detach()
    core = native.load()
    index = torch.cuda.current_device()
    for most_bytes in (64 << 20, 1 << 20):  # first with memplug in front of torch's allocator, then without
        in_front = most_bytes > 1 << 20
        core.catch_out_of_memory(in_front, f"cuda:{index}", None)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.empty(most_bytes, dtype=torch.uint8, device="cuda")
        assert torch.cuda.max_memory_allocated() == before + most_bytes
    core.catch_out_of_memory(True, f"cuda:{index}", None)
    assert torch.cuda.max_memory_allocated() == before + most_bytes
    core.catch_out_of_memory(False, f"cuda:{index}", None)


@pytest.mark.parametrize("block, steps", [(ALONE, 8), (WATCHING, 2)], ids=["arena", "swap"])
def test_deleting_a_session_restores_torchs_allocator(block: dict, steps: int) -> None:
    if "swap" in block and not native.load().StorageSwapper.is_possible():
        pytest.skip("a swap list needs torch 2.13")
    library = ctypes.CDLL("libc10_cuda.so")
    allocator = ctypes.c_void_p.in_dll(library, "_ZN3c104cuda20CUDACachingAllocator9allocatorE")
    before = allocator.value
    model = llama().cuda()
    session = memplug.attach(model, block)
    for _ in range(steps):
        step(model)
        model.zero_grad()
        session.step()
    assert allocator.value != before
    del model, session
    gc.collect()
    assert allocator.value == before
