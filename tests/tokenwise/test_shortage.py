"""If host memory runs out, memplug swaps less; once there is room again, it swaps more."""

from __future__ import annotations

import torch

import memplug
from tests.support.blocks import LAYERS, Stack, assert_same, gradients, twin

BUDGET = 128 << 10


def test_swapped_share_follows_the_free_host_memory() -> None:
    torch.manual_seed(0)
    model = Stack(4)
    reference = twin(model)
    block = {
        "enabled": True,
        "arena": {"enabled": False},
        "tokenwise": {"regions": LAYERS, "min_offload_bytes": 1, "alpha": 1},
        "host_budget_gib": BUDGET / 2**30,
    }
    shares, refusals = [], []
    with memplug.attach(model, block) as session:
        executor = session._attached.executor
        for tokens in [96] * 12 + [24] * 12:
            x = torch.randn(2, tokens // 2, 16)
            model(x).backward()
            reference(x).backward()
            assert_same(gradients(model), gradients(reference))
            session.step()
            shares.append(executor.flow.share)
            refusals.append(executor.transfer.refused)
        assert not executor.pool.used_bytes
    long, short = shares[:12], shares[12:]
    assert 0.3 < min(long) < 0.9
    assert refusals[5] == refusals[-1], "the share that fits is found within a few steps, and does not oscillate"
    assert len(set(long[8:])) == 1
    assert short[-1] == 1.0 and short == sorted(short)
