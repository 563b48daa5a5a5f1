"""Find the arena of Megatron-Core's mixture by training it on the CPU, or by an estimate, and write its bytes.

Started by a launcher, on as many ranks as share the experts on the CPU, and on one for the estimate:

    torchrun --nproc-per-node RANKS -m tests.support.routed_megatron_worker cpu FOLDER ROUTING RANKS
    python -m tests.support.routed_megatron_worker virtual FOLDER ROUTING RANKS

`FOLDER/DEVICE.json` is {"bytes": of rank 0's arena, "room": of these, its room's}. The experts run one after the other.
On the CPU each token draws its experts as the estimate's do, in place of the router's choice. Layer norms replace RMS
norms, of which torch has no fused kernel on the CPU, so that they save an output more than on a GPU.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional

import memplug
from tests.support import megatron_worker

TOKENS, STEPS, CHOSEN, EXPERTS = 512, 40, 2, 8
SHAPE = {
    **{"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "rms_norm_eps": 1e-5},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
    **{"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "router_aux_loss_coef": 0.02},
}
BLOCK = {
    **{"enabled": True, "plan_dir": False, "profiler": {"wait_for_plans": True}},
    **{"swap": {"enabled": False}, "tokenwise": {"enabled": False}},
}


def drawing(gating: Callable[..., torch.Tensor], exponent: float) -> Callable[..., torch.Tensor]:
    """Wrap a router's `gating`: expert i is the best in proportion to (i + 1) ** -exponent; no memory is requested."""
    random = np.random.default_rng(10 + dist.get_rank())
    likely = -exponent * np.log(np.arange(1, EXPERTS + 1))

    def run(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        logits = gating(self, hidden)
        logits.detach().numpy()[...] = likely + random.gumbel(size=tuple(logits.shape))
        return logits

    return run


def trained(exponent: float, ranks: int) -> dict[str, int]:
    """Train on the CPU, and return what `main` writes."""
    megatron_worker.prepare()
    import model as recipe  # of examples/megatron_llama2
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.moe.router import TopKRouter

    dist.init_process_group("gloo")
    parallel, shares = recipe.Parallel(expert=ranks), ranks > 1
    recipe.initialize(parallel, seed=0)
    config = recipe.transformer_config(SHAPE, parallel, torch.float32)
    chunks = recipe.build_chunks(config, SHAPE, TOKENS, shares)
    optimizer = recipe.build_optimizer(chunks, torch.float32, 1e-4, shares)
    for group in optimizer.param_groups:
        group["fused"] = True  # as the estimate's
    tokens = torch.Generator().manual_seed(1 + dist.get_rank())

    def forward_step(batches: Any, module: torch.nn.Module) -> Any:
        ids = torch.randint(0, SHAPE["vocab_size"], (1, TOKENS), generator=tokens)
        output = module(ids, torch.arange(TOKENS)[None], None, labels=ids)
        return output, lambda output: (output.float().mean(), {})

    def normed(x: torch.Tensor, shape: Any, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return functional.layer_norm(x, shape, weight, None, eps)

    with (
        mock.patch.object(functional, "rms_norm", normed),
        mock.patch.object(TopKRouter, "gating", drawing(TopKRouter.gating, exponent)),
        memplug.attach(chunks, BLOCK) as session,
    ):
        for _ in range(STEPS):
            chunks[0].zero_grad_buffer()
            optimizer.zero_grad()
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=None,
                model=chunks[0],
                num_microbatches=1,
                seq_length=TOKENS,
                micro_batch_size=1,
                forward_only=False,
            )
            optimizer.step()
            session.step()
        report = session.report().arena
    assert report.state == "serving", report
    return {"bytes": report.bytes, "room": report.room_bytes}


def estimated(routing: str, ranks: int) -> dict[str, int]:
    """Return what `main` writes, by the estimate of rank 0."""
    from memplug.predict.estimator.estimate import estimate_training
    from memplug.predict.estimator.layout import RankLayout
    from memplug.predict.estimator.megatron import MegatronTraining, rank_of
    from memplug.predict.estimator.request import EstimateRequest
    from memplug.predict.estimator.shapes import Shape
    from memplug.predict.estimator.workload import Workload

    request = EstimateRequest.of(BLOCK, "h200", ["keep"], routing=routing)
    layers, layout = SHAPE["num_hidden_layers"], RankLayout(expert=ranks)
    workload = Workload(shape=Shape(SHAPE), layers=layers, seq_len=TOKENS, dtype="fp32", routing=request.routing)
    make_training = functools.partial(MegatronTraining, workload, layout, 1)
    rank = functools.partial(rank_of, layout, 0, workload, 1)
    found = estimate_training(make_training, request, rank=rank)["keep"]
    assert not found.arena_off_because, found.arena_off_because
    return {"bytes": found.arena_bytes, "room": found.arena_room_bytes}


def main() -> None:
    """Write the bytes."""
    device, folder, routing, ranks = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    if device == "virtual":
        found = estimated(routing, ranks)
    else:
        found = trained(float(routing == "zipf"), ranks)
    if device == "virtual" or dist.get_rank() == 0:
        (folder / f"{device}.json").write_text(json.dumps(found))
    if device == "cpu":
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # back ends of collectives may still have threads, which may fail while Python ends


if __name__ == "__main__":
    main()
