"""Train a tiny Megatron-Core model on this rank, once for every case, and write the results to a file per rank.

Started by a launcher: `torchrun --nproc-per-node N -m tests.support.megatron_worker FOLDER LAYOUT CASES`. `LAYOUT` is a
JSON object of `Parallel`'s fields (examples/megatron_llama2/model.py) and of

* "experts": how many, 0: a dense model; "tokens": how many a sequence has; "micro_batches": how many a step has;
  "distributed_optimizer"; "learning_rate"; "steps": how many;
* "same": every micro-batch is the same, and the optimizer makes no step;
* "transformer_engine": the layers come from the stand-in for Transformer Engine, which context parallelism needs;
* "fields": fields of TransformerConfig;
* "device": "cuda" to train on this rank's CUDA device; without it the CPU stands in for one.

`CASES`: name -> the "memplug" block, or null to train without memplug. A block may also hold:

* "short_of_host_memory": [rank, step]; from this step on that rank's pool has room for half of the memory that the rank
  took in the step before;
* "alpha_of_rank": α for each rank; if attaching then fails, the result is its "error";
* "budget_share": the device budget, as a share of the largest peak of the case "roomy" on any rank.

`FOLDER/RANK.pt` gets name -> {"losses": of each micro-batch, on the last pipeline stage, "gradients": of the first
step, "digests": a digest of all gradients in each step, "report": memplug's, "history": its (step, stage) pairs,
"shares": for each step the share of rows swapped, "served": for each step the requests that the arena served,
"peak_bytes": the peak of the recorded step, if there is one, "step_bytes": on CUDA, by how much the last step's peak
exceeds the memory in use before it}.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support import stand_in
from tests.support.cases_worker import run_short
from tests.support.folders import ROOT

RECIPE = ROOT / "examples" / "megatron_llama2"
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
}
TOKENS, SEQUENCES = 32, 2  # per micro-batch


def _loss_function(losses: list[float], output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    loss = output.float().mean()
    losses.append(loss.item())
    return loss, {}


def _micro_batches(step: int, same: bool, length: int) -> Any:
    from megatron.core import parallel_state

    generator = torch.Generator().manual_seed(1000 * (not same) * step + parallel_state.get_data_parallel_rank())
    tokens = torch.randint(0, SHAPE["vocab_size"], (SEQUENCES, length + 1), generator=generator)
    while True:
        yield tokens.to(torch.cuda.current_device())
        if not same:
            tokens = torch.randint(0, SHAPE["vocab_size"], (SEQUENCES, length + 1), generator=generator)


def _gradients(chunks: list[torch.nn.Module]) -> list[torch.Tensor]:
    return [parameter.main_grad.cpu().clone() for chunk in chunks for parameter in chunk.parameters()]


def _digest(tensors: list[torch.Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.contiguous().numpy().tobytes())
    return total.hexdigest()


def _given(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the tokens, their positions and the labels that this rank has of each sequence."""
    import model as recipe

    positions = torch.arange(tokens.shape[1] - 1, device=tokens.device)[None].expand(SEQUENCES, -1)
    given = {"tokens": tokens[:, :-1], "positions": positions, "labels": tokens[:, 1:]}
    return tuple(recipe.share_of(given).values())


def _memory_in_use() -> int | None:
    """Return the device memory in use, after which the peak counts anew; None on the CPU."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _report(session: Any) -> dict[str, Any]:
    """Return the session's report, and detach it."""
    found = {
        "report": session.report().as_dict(),
        "history": [(step, stage.value) for step, stage, _, _ in session.history],
    }
    if session.trace is not None:
        found["peak_bytes"] = int(session.trace.live_bytes.max())
    session.detach()
    return found


def run(layout: dict[str, Any], block: dict[str, Any] | None) -> dict[str, Any]:
    """Train a new model under a block, and return the results."""
    import model as recipe
    from megatron.core.pipeline_parallel import get_forward_backward_func

    import memplug.errors

    fields = {"tensor", "sequence", "pipeline", "chunks", "context", "expert", "dispatcher"} & set(layout)
    parallel = recipe.Parallel(**{field: layout[field] for field in fields})
    recipe.initialize(parallel, seed=0)
    experts = {"num_local_experts": layout["experts"], "num_experts_per_tok": 2} if layout.get("experts") else {}
    config = recipe.transformer_config({**SHAPE, **experts}, parallel, torch.float32, **layout.get("fields", {}))
    distributed = layout.get("distributed_optimizer", False)
    length = layout.get("tokens", TOKENS)
    chunks = recipe.build_chunks(config, {**SHAPE, **experts}, length, distributed)
    optimizer = recipe.build_optimizer(chunks, torch.float32, layout.get("learning_rate", 1e-2), distributed)
    block = dict(block) if block is not None else None
    short = block.pop("short_of_host_memory", None) if block else None
    alphas = block.pop("alpha_of_rank", None) if block else None
    if alphas is not None:
        block["tokenwise"] = {**block["tokenwise"], "alpha": alphas[dist.get_rank()]}
    try:
        session = memplug.attach(chunks, block) if block is not None else None
    except memplug.errors.ConfigError as error:
        return {"error": str(error)}
    forward_backward = get_forward_backward_func()
    same = layout.get("same", False)
    losses: list[float] = []
    found: dict[str, Any] = {"losses": losses, "digests": [], "shares": [], "served": []}

    def forward_step(batches: Any, module: torch.nn.Module) -> Any:
        tokens, positions, labels = _given(next(batches))
        output = module(tokens, positions, None, labels=labels)
        return output, functools.partial(_loss_function, losses)

    steps = layout.get("steps", 20)
    for step in range(steps):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        if short:
            run_short(session, step, short)
        batches = [_micro_batches(step, same, length) for _ in chunks]
        before = _memory_in_use()
        if session is not None and not session._attached.regions and step == steps - 2:
            session.record()
        forward_backward(
            forward_step_func=forward_step,
            data_iterator=batches if len(chunks) > 1 else batches[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=layout.get("micro_batches", 1),
            seq_length=length,
            micro_batch_size=SEQUENCES,
            forward_only=False,
        )
        if before is not None:
            found["step_bytes"] = torch.cuda.max_memory_allocated() - before
        gradients = _gradients(chunks)
        found.setdefault("gradients", gradients)
        found["digests"].append(_digest(gradients))
        if not same:
            optimizer.step()
        if session is not None:
            session.step()
            found["shares"].append(session._attached.executor.flow.share)
            serving = session._attached.boundary.followers.find("arena")
            found["served"].append(serving.step.from_arena if serving is not None else 0)
    if session is not None:
        found |= _report(session)
    return found


@functools.cache
def prepare() -> None:
    """Pretend that the CPU is a CUDA device, and import the recipe; once per process."""
    sys.path.insert(0, str(RECIPE))
    import cpu

    cpu.pretend()
    importlib.import_module("model")


def use_cuda() -> None:
    """Choose this rank's CUDA device, and import the recipe."""
    sys.path.insert(0, str(RECIPE))
    importlib.import_module("model")
    torch.compiler.set_stance("force_eager")  # compiled kernels are not simulated
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def recompute_without_transformer_engine() -> None:
    """Let Megatron-Core recompute the outputs of norms, which asks Transformer Engine whether FP8 is on."""
    from megatron.core.tensor_parallel import random

    if not random.HAVE_TE:
        random.FP8GlobalStateManager = types.SimpleNamespace(is_fp8_enabled=lambda: False)
        random.activation_recompute_forward = random.fp8_autocast = lambda **options: contextlib.nullcontext()


def main() -> None:
    """Run all cases on this rank."""
    folder, layout, cases = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
    if layout.get("transformer_engine"):
        stand_in.use()
    on_cuda = layout.get("device") == "cuda"
    use_cuda() if on_cuda else prepare()
    from megatron.core import parallel_state

    recompute_without_transformer_engine()
    if layout.get("transformer_engine"):
        stand_in.transformer_engine_layers()
    dist.init_process_group("nccl" if on_cuda else "gloo")
    results = {}
    for name, block in cases.items():
        if block and "budget_share" in block:
            most = torch.tensor(results["roomy"]["peak_bytes"])
            dist.all_reduce(most, dist.ReduceOp.MAX)
            block["device_budget_gib"] = block.pop("budget_share") * most.item() / 2**30
        results[name] = run(layout, block)
        dist.barrier()
        parallel_state.destroy_model_parallel()
    torch.save(results, folder / f"{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
