"""A program written for CUDA, tokens routed evenly to experts, and a DeepSpeed rank, on the virtual device."""

from __future__ import annotations

import pytest
import torch

from memplug.predict.virtual import VirtualDevice
from memplug.predict.virtual.as_cuda import as_cuda
from memplug.predict.virtual.experts import routed
from memplug.predict.virtual.ranks import joined
from memplug.predict.virtual.routing import Routing
from tests.support import hosts
from tests.support.virtual_devices import MIB, SIMPLE, seconds


def test_cuda_program_runs_and_torch_cuda_is_restored(device: VirtualDevice) -> None:
    before = vars(torch.cuda).copy()
    with as_cuda():
        used = torch.cuda.memory_allocated()
        x = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
        assert x.is_cuda and x.type() == "torch.cuda.ByteTensor" and torch.cuda.memory_allocated() - used == MIB
        assert torch.ones(2).cuda().device == x.device == torch.ones(2, device=torch.cuda.current_device()).device
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            assert torch.cuda.current_stream() == side
            began = seconds(device)
            x.add_(1)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        assert seconds(device) - began == pytest.approx(2 * MIB / SIMPLE.memory_bytes_per_s, rel=1e-2)
    assert vars(torch.cuda) == before and not torch.ones(2).is_cuda


def test_evenly_routed_mask_selects_each_experts_share_of_tokens(device: VirtualDevice) -> None:
    tokens, mask = torch.empty(8, 16, device="virtual"), torch.empty(8, 16, dtype=torch.bool, device="virtual")
    with routed(Routing(), chosen=2, experts=8):
        assert len(tokens.masked_select(mask)) == 8 * 16 * 2 // 8
    assert len(tokens.masked_select(mask)) == 8 * 16


def test_deepspeed_rank_holds_its_share_of_optimizer_states(device: VirtualDevice) -> None:
    pytest.importorskip("deepspeed")
    from memplug.predict.virtual.accelerator import accelerated

    ranks = 8
    with joined(0, ranks), accelerated(), pytest.MonkeyPatch.context() as environment:
        environment.setenv("LOCAL_RANK", "0")
        engine = hosts.make_engine(hosts.ds_config(2, bf16={"enabled": True}))
        tokens = hosts.tokens().to("virtual")
        for _ in range(2):
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        assert engine.global_steps == 2 and engine.skipped_steps == 0
        states = [state["exp_avg"] for state in engine.optimizer.optimizer.state.values()]
        assert all(each.device.type == "virtual" for each in states)
        parameters = sum(each.numel() for each in engine.module.parameters())
        assert sum(each.numel() for each in states) == pytest.approx(parameters / ranks, rel=0.01)
