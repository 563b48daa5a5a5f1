"""Runs the stand-in of Transformer Engine on two ranks, and under Megatron-Core.

`torchrun --nproc-per-node 2 -m tests.support.stand_in_ranks_worker FOLDER` writes the results to a file per rank,
`FOLDER/RANK.pt`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support import megatron_worker, stand_in

COMMUNICATION = ("p2p", "all_gather", "a2a")
LAYOUTS: dict[str, dict[str, Any]] = {
    "dense": {"tensor": 2, "sequence": True, "micro_batches": 2},
    "experts": {"expert": 2, "experts": 4},
}


def context_parallel() -> dict[str, float]:
    """Compare outputs and gradients of this rank's tokens with those of one rank that has all tokens.

    Returns:
        The largest difference of each case.
    """
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.attention.dot_product_attention.context_parallel import _of_rank

    rank, found = dist.get_rank(), {}
    for form, mask in (("sbhd", "causal"), ("bshd", "causal"), ("sbhd", "no_mask")):
        torch.manual_seed(7)
        s = form.index("s")
        sizes = [(2, 12), (12, 2)][s == 0]
        q, k, v = (torch.randn(*sizes, heads, 8) for heads in (4, 2, 2))
        grad = torch.randn(*sizes, 32)
        alone = te.DotProductAttention(4, 8, num_gqa_groups=2, qkv_format=form, attn_mask_type=mask)
        wanted = _with_gradients(alone, (q, k, v), grad)

        def mine(x: torch.Tensor, s: int = s, causal: bool = mask == "causal") -> torch.Tensor:
            return _of_rank(x, s, 2, rank, causal).contiguous()

        for communication in COMMUNICATION:
            core = te.DotProductAttention(4, 8, num_gqa_groups=2, qkv_format=form, attn_mask_type=mask)
            core.set_context_parallel_group(dist.group.WORLD, [0, 1], None, communication)
            results = _with_gradients(core, [mine(x) for x in (q, k, v)], mine(grad))
            pairs = zip(results, wanted, strict=True)
            found[f"{form} {mask} {communication}"] = max(float((x - mine(y)).abs().max()) for x, y in pairs)
    return found


def _with_gradients(module: Any, inputs: Any, grad: torch.Tensor) -> list[torch.Tensor]:
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = module(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def tensor_parallel() -> dict[str, float]:
    """Compare two linear layers and a LayerNormMLP, sharded by tensor parallelism, with the same layers on one rank.

    With sequence parallelism each rank has some of the tokens, otherwise all of them.

    Returns:
        The largest difference of each case.
    """
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    rank, found = dist.get_rank(), {}
    torch.manual_seed(11)
    x, grad = torch.randn(8, 2, 32), torch.randn(8, 2, 32)
    whole = [te.LayerNormLinear(32, 64, bias=False), te.Linear(64, 32, bias=False)]
    for sequence in (False, True):
        common = {"bias": False, "tp_group": dist.group.WORLD, "sequence_parallel": sequence}
        shared = [
            te.LayerNormLinear(32, 64, parallel_mode="column", **common),
            te.Linear(64, 32, parallel_mode="row", **common),
        ]
        with torch.no_grad():
            for dim, (mine, all_) in enumerate(zip(shared, whole, strict=True)):
                mine.weight.copy_(all_.weight.chunk(2, dim)[rank])
        rows = slice(4 * rank, 4 * rank + 4) if sequence else slice(None)
        wanted = _with_gradients(lambda x: whole[1](whole[0](x)), [x], grad)
        results = _with_gradients(lambda x, m=shared: m[1](m[0](x)), [x[rows]], grad[rows])
        found[f"linears, sequence_parallel={sequence}"] = _worst(results, [y[rows] for y in wanted])
        alone = te.LayerNormMLP(32, 64, bias=False)
        options = {"set_parallel_mode": True, **common}
        both = te.LayerNormMLP(32, 64, **options)
        with torch.no_grad():
            both.fc1_weight.copy_(alone.fc1_weight.chunk(2, 0)[rank])
            both.fc2_weight.copy_(alone.fc2_weight.chunk(2, 1)[rank])
        wanted = [y[rows] for y in _with_gradients(alone, [x], grad)]
        found[f"LayerNormMLP, sequence_parallel={sequence}"] = _worst(
            _with_gradients(both, [x[rows]], grad[rows]), wanted
        )
        with te.autocast(enabled=True, recipe=recipe.Float8CurrentScaling()):
            results = _with_gradients(both, [x[rows]], grad[rows])
        found[f"FP8, sequence_parallel={sequence}"] = _worst(results, wanted)
    return found


def _worst(results: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(results, wanted, strict=True))


def reduced_scales() -> list[float]:
    """Return the scales after steps of FP8 with different inputs on each rank."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    torch.manual_seed(13)
    linear = te.Linear(32, 32)
    for step in range(2):
        with te.autocast(enabled=True, recipe=recipe.DelayedScaling(), amax_reduction_group=dist.group.WORLD):
            out = linear(torch.full((8, 32), 1.0 + step + 3 * dist.get_rank(), requires_grad=True))
        out.sum().backward()
    return [*linear.fp8_meta["scaling_fwd"].scale.tolist(), *linear.fp8_meta["scaling_bwd"].scale.tolist()]


def _fill(weight: torch.Tensor) -> None:
    """Fill a weight by its shape alone, since grouped experts draw random weights in another order."""
    generator = torch.Generator().manual_seed(weight.shape[0] * 1000 + weight.shape[1])
    with torch.no_grad():
        weight.copy_(0.05 * torch.randn(weight.shape, generator=generator))


def megatron() -> dict[str, Any]:
    """Return the losses of GPTModels made of torch's operators, and of GPTModels of Transformer Engine's layers."""
    from megatron.core import parallel_state

    found: dict[str, Any] = {}
    for kind in ("local", "te"):
        if kind == "te":
            stand_in.transformer_engine_layers()
        for name, layout in LAYOUTS.items():
            fields = {
                "moe_grouped_gemm": kind == "te" and "experts" in layout,
                "init_method": _fill,
                "output_layer_init_method": _fill,
            }
            found[f"{name} {kind}"] = megatron_worker.run({"steps": 3, **layout, "fields": fields}, None)["losses"]
            dist.barrier()
            parallel_state.destroy_model_parallel()
    return found


def names() -> list[str]:
    """Return the names under which this version of Transformer Engine keeps FP8's state."""
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    return [name for name in ("AUTOCAST_DEPTH", "quantization_state") if hasattr(FP8GlobalStateManager, name)]


def megatron_context() -> dict[str, float]:
    """Compare a GPTModel that splits the tokens over both ranks with one on one rank.

    Returns:
        The largest differences of this rank's losses, and of all gradients.
    """
    import model as recipe
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    stand_in.let_megatron_split_sequences()
    shape, results = megatron_worker.SHAPE, []
    for ranks in (1, 2):
        parallel_state.initialize_model_parallel(context_parallel_size=ranks)
        torch.manual_seed(0)
        model_parallel_cuda_manual_seed(0)
        config = recipe.transformer_config(shape, recipe.Parallel(), torch.float32, context_parallel_size=ranks)
        common = {"vocab_size": shape["vocab_size"], "max_sequence_length": 32, "position_embedding_type": "rope"}
        model = GPTModel(config, recipe.block_spec(config), **common)
        tokens = torch.randint(0, shape["vocab_size"], (2, 33), generator=torch.Generator().manual_seed(1))
        batch = {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "position_ids": torch.arange(32).expand(2, -1),
        }
        places = torch.arange(32).expand(2, -1)
        batch = recipe.share_of({**batch, "places": places})
        losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        losses.sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        for gradient in gradients if ranks == 2 else []:
            dist.all_reduce(gradient)
        results.append((batch["places"], losses.detach(), gradients))
        dist.barrier()
        parallel_state.destroy_model_parallel()
    (_, whole, wanted), (places, mine, gradients) = results
    pairs = zip(gradients, wanted, strict=True)
    return {
        "losses": float((mine - whole.gather(1, places)).abs().max()),
        "gradients": max(float((x - y).abs().max() / y.abs().max()) for x, y in pairs),
    }


def main() -> None:
    """Run all cases on this rank."""
    stand_in.use(transformer_engine="2.18.0")  # `tests.support.stand_in_worker` uses 2.10
    megatron_worker.prepare()
    from transformer_engine.stand_in import calls

    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    for case in (context_parallel, tensor_parallel, reduced_scales, megatron, megatron_context, names):
        results[case.__name__] = case()
    results["functions"] = dict(calls.functions)
    torch.save(results, Path(sys.argv[1]) / f"{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
