"""Runs the stand-ins of Transformer Engine and flash-attn on simulated CUDA; writes `FOLDER/RANK.json`.

Started by `torchrun --nproc-per-node 2 -m tests.cudasim.stand_in_worker FOLDER`. The results are case -> schedule ->
{"numbers", "violations"}.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.cudasim import device
from tests.cudasim.device import Schedule
from tests.support import megatron_worker, stand_in

SCHEDULES = [Schedule("eager"), Schedule("lazy"), Schedule("computefirst"), Schedule("random", 3)]


def layer(where: str) -> list[float]:
    """Return losses of a bfloat16 layer that trains in FP8 by delayed scaling, with flash-attn every other step."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    torch.manual_seed(3)
    shape = {"normalization": "RMSNorm", "activation": "swiglu", "num_gqa_groups": 2, "params_dtype": torch.bfloat16}
    module = te.TransformerLayer(32, 64, 4, hidden_dropout=0.0, attention_dropout=0.0, device="cpu", **shape).to(where)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(5)
    losses = []
    for step in range(4):
        x = torch.randn(16, 2, 32, generator=generator).to(where, torch.bfloat16).requires_grad_()
        with (
            te.autocast(enabled=True, recipe=recipe.DelayedScaling()),
            mock.patch.dict(os.environ, {"NVTE_FUSED_ATTN": str(step % 2)}),
        ):
            out = te.checkpoint(module, x) if step < 2 else module(x)
            loss = out.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def ring(where: str) -> list[float]:
    """Return a number for each gradient of attention over both ranks' tokens; its ring uses two streams in turn."""
    import transformer_engine.pytorch as te

    torch.manual_seed(7 + dist.get_rank())
    core = te.DotProductAttention(4, 8, num_gqa_groups=2)
    stream = torch.cuda.Stream() if where == "cuda" else None
    core.set_context_parallel_group(dist.group.WORLD, [0, 1], stream, "p2p")
    found = []
    for _ in range(2):
        q, k, v = (torch.randn(12, 2, heads, 8).to(where).requires_grad_() for heads in (4, 2, 2))
        out = core(q, k, v)
        out.square().sum().backward()
        found += [x.grad.square().sum() for x in (q, k, v)]
    return [number.item() for number in found]


def ring_without_waits(where: str) -> list[float]:
    """Run `ring` without waits between the streams; return no numbers, since they would mean nothing."""
    with mock.patch.object(torch.cuda.Stream, "wait_stream", lambda self, other: None):
        ring(where)
    return []


def megatron(where: str) -> list[float]:
    """Return losses of a GPTModel with Transformer Engine's layers."""
    from megatron.core import parallel_state

    losses = megatron_worker.run({"tensor": 2, "sequence": True, "steps": 2}, None)["losses"]
    parallel_state.destroy_model_parallel()
    return losses


def run(case: Callable[[str], list[float]], where: str, schedule: Schedule) -> dict[str, Any]:
    """Run a case under a schedule, and return its numbers and violations."""
    before = device.violations()
    with device.scheduled(schedule):
        numbers = case(where)
        torch.cuda.synchronize()
    dist.barrier()
    return {"numbers": numbers, "violations": device.violations() - before}


def main() -> None:
    """Run all cases on this rank."""
    stand_in.use()
    megatron_worker.use_cuda()
    stand_in.transformer_engine_layers()
    from transformer_engine.stand_in import calls

    dist.init_process_group("cpu:gloo,cuda:nccl")
    results: dict[str, Any] = {}
    for case in (layer, ring, megatron):
        results[case.__name__] = found = {str(schedule): run(case, "cuda", schedule) for schedule in SCHEDULES}
        if case is not megatron:
            found["cpu"] = {"numbers": case("cpu"), "violations": 0}
    results["ring_without_waits"] = {"lazy": run(ring_without_waits, "cuda", Schedule("lazy"))}
    results["forwards"] = {name: dict(calls.functions)[name] for name in ("FlashAttnFunc", "FusedAttnFunc")}
    (Path(sys.argv[1]) / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
