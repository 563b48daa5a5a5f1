"""Train tiny models on this rank, record one step of each, and write its memory requests.

    torchrun --nproc-per-node 2 -m tests.support.requests_worker cpu FOLDER PROGRAM...
    python -m tests.support.requests_worker virtual FOLDER PROGRAM...

On the CPU every rank is a process. On the virtual device this process is one of two ranks; with Megatron-Core it is
first one rank, then the other. `FOLDER/DEVICE-RANK.json` gets program -> [pass, bytes, operator] of each request of the
thread that trains, in program order. A program is "llama" or "llama-sdpa" (one rank alone), "zero-STAGE", or
"megatron-" and a name of `LAYOUTS`; all programs of a command use one framework.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree

import memplug
from memplug.profile.trace import EventKind, Trace
from tests.support import hosts

RECORDS: dict[str, Any] = {  # a block that only records: everything fits, so nothing is swapped
    "enabled": True,
    "plan_dir": False,
    "device_budget_gib": 100,
    "tokenwise": {"enabled": False},
    "arena": {"enabled": False},
}
STEPS, RECORDED = 4, 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2},
    "sequence": {"tensor": 2, "sequence": True},
    "pipeline": {"pipeline": 2},
    "expert": {"expert": 2},
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
COLLECTIVES = """allreduce allreduce_coalesced allgather allgather_coalesced _allgather_base all_gather_single
allgather_into_tensor_coalesced all_gather_single_coalesced reduce_scatter _reduce_scatter_base reduce_scatter_single
reduce_scatter_tensor_coalesced reduce_scatter_single_coalesced broadcast reduce""".split()
"""Methods of a process group besides `send` and `recv`; each version of torch has some of them."""
Requests = list[tuple[str, int, str]]


def llama(device: str, attention: str = "eager") -> Requests:
    """Return the requests of a single rank with plain AdamW."""
    model = hosts.tiny_llama(attn_implementation=attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens = hosts.tokens().to(device)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return _recorded(model, step)


def zero(stage: int, device: str) -> Requests:
    """Return the requests of a DeepSpeed engine."""
    model = hosts.tiny_llama(attn_implementation="eager")
    fields = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    engine = hosts.make_engine(hosts.ds_config(stage, **fields), model)
    _one_by_one(engine.optimizer)
    tokens = hosts.tokens().to(device)

    def step() -> None:
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()

    return _recorded(engine, step, steps_itself=True)


def megatron(layout: dict[str, Any], device: str) -> Requests:
    """Return the requests of Megatron-Core, with its own schedule, data-parallel wrapper and optimizer."""
    import model as recipe
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from tests.support.megatron_worker import SEQUENCES, SHAPE, TOKENS

    parallel = recipe.Parallel(**layout)
    recipe.initialize(parallel, seed=0)
    shape = SHAPE | (EXPERTS if parallel.expert > 1 else {})
    config = recipe.transformer_config(shape, parallel, torch.float32)
    _compose(recipe)
    chunks = recipe.build_chunks(config, shape, TOKENS, distributed_optimizer=False)
    optimizer = recipe.build_optimizer(chunks, torch.float32, 1e-3, distributed=False)
    _one_by_one(optimizer)
    tokens = torch.zeros(SEQUENCES, TOKENS, dtype=torch.long).to(device)
    positions = torch.arange(TOKENS)[None].expand(SEQUENCES, -1).to(device)

    def forward_step(batches: Any, module: torch.nn.Module) -> Any:
        return module(tokens, positions, None, labels=tokens), lambda output: (output.float().mean(), {})

    def step() -> None:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=None,
            model=chunks[0],
            num_microbatches=2,
            seq_length=TOKENS,
            micro_batch_size=SEQUENCES,
            forward_only=False,
        )
        optimizer.step()

    try:
        with _balanced(device) if parallel.expert > 1 else contextlib.nullcontext():
            return _recorded(chunks, step)
    finally:
        parallel_state.destroy_model_parallel()


@contextlib.contextmanager
def _balanced(device: str) -> Iterator[None]:
    """Route equally many tokens to all experts inside the `with`."""
    if device == "virtual":
        from memplug.predict.virtual.experts import routed
        from memplug.predict.virtual.routing import Routing

        with routed(Routing(), EXPERTS["num_experts_per_tok"], EXPERTS["num_local_experts"]):
            yield
        return
    from megatron.core.transformer.moe.router import TopKRouter

    def route(self: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        probabilities, chosen = routing(self, hidden, *args, **kwargs)
        tokens, experts = chosen.shape
        turn = torch.arange(tokens)[:, None] + torch.arange(self.topk)
        even = torch.zeros_like(chosen).scatter_(1, turn % experts, True)
        return probabilities, even

    routing = TopKRouter.routing
    with mock.patch.object(TopKRouter, "routing", route):
        yield


def _one_by_one(optimizer: Any) -> None:
    """Make the optimizer step one parameter at a time, as on the CPU; on a device it would step all of them at once."""
    for group in optimizer.param_groups:
        group["foreach"] = False


def _compose(recipe: Any) -> None:
    """Build attention and norms from common operators, since their device kernels save other tensors than the CPU's."""
    import layers  # the recipe's module

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight

    def attend(self: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
        scores = torch.softmax(query @ key.transpose(2, 3) * self.scale, -1)
        return (scores @ value).permute(2, 0, 1, 3).flatten(2)

    layers.RMSNorm.forward, layers.ScaledDotProductAttention.forward = norm, attend


def _recorded(target: Any, step: Callable[[], None], steps_itself: bool = False) -> Requests:
    with memplug.attach(target, RECORDS) as session:
        for number in range(STEPS):
            if number == RECORDED:
                session.record()
            step()
            if not steps_itself:
                session.step()
        return _requests(session.trace)


def _requests(trace: Trace) -> Requests:
    events = trace.events[(trace.events["kind"] == EventKind.MALLOC) & (trace.events["thread"] == 0)]
    return [
        (trace.phases[event["phase"]].kind.name, int(event["nbytes"]), _outermost(trace, int(event["operator"])))
        for event in events
    ]


def _outermost(trace: Trace, operator: int) -> str:
    """Return the name of the outermost operator that contains this one."""
    while operator > 0 and trace.operators["depth"][operator] > 0:
        operator -= 1
    return trace.names[trace.operators["name"][operator]] if operator >= 0 else ""


# -- ranks and frameworks ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _staging_elsewhere() -> Iterator[None]:
    """Run collectives on another thread inside the `with`, so that gloo's requests do not count as the program's.

    A collective is complete when it returns, and runs on copies of its arguments: gloo's threads hold the arguments for
    a moment longer, and autograd does not add in place to a gradient that another thread holds.
    """

    def moved(collective: Any) -> Any:
        @torch.no_grad()
        def run(group: Any, *args: Any) -> Any:
            copies = pytree.tree_map_only(torch.Tensor, torch.clone, args)
            work = collective(group, *copies)
            work.wait()
            for taken, copy in zip(pytree.tree_leaves(args), pytree.tree_leaves(copies), strict=True):
                if isinstance(taken, torch.Tensor):
                    taken.copy_(copy)
            return work

        return lambda *args: thread.submit(run, *args).result()

    def called(operation: Any) -> Any:
        return lambda *args: thread.submit(operation, *args).result()

    with ThreadPoolExecutor(1) as thread, contextlib.ExitStack() as stack:
        for names, elsewhere in ((COLLECTIVES, moved), (("send", "recv"), called)):
            for name in (name for name in names if hasattr(dist.ProcessGroup, name)):
                operation = elsewhere(getattr(dist.ProcessGroup, name))
                stack.enter_context(mock.patch.object(dist.ProcessGroup, name, operation))
        yield


@contextlib.contextmanager
def _on(device: str, is_megatron: bool, rank: int) -> Iterator[None]:
    """Make this process one of two ranks inside the `with`."""
    with contextlib.ExitStack() as stack:
        if device == "virtual":
            from memplug.predict.virtual.as_cuda import as_cuda
            from memplug.predict.virtual.ranks import joined

            if is_megatron:
                torch.compiler.set_stance("force_eager")
                stack.enter_context(as_cuda())
            stack.enter_context(joined(rank=rank, world_size=2))
            if not is_megatron:
                from memplug.predict.virtual.accelerator import accelerated

                stack.enter_context(accelerated())
        else:
            stack.enter_context(_staging_elsewhere())
            dist.init_process_group("gloo")
            if not is_megatron:
                import deepspeed

                deepspeed.init_distributed("gloo")
            stack.callback(dist.destroy_process_group)
            stack.callback(dist.barrier)
        yield


def _program(name: str, device: str) -> Callable[[], Requests]:
    kind, _, rest = name.partition("-")
    if kind == "llama":
        return functools.partial(llama, device, rest or "eager")
    if kind == "zero":
        return functools.partial(zero, int(rest), device)
    return functools.partial(megatron, LAYOUTS[rest], device)


def _prepare(device: str, framework: str) -> None:
    """Prepare the device and the framework, before any code of the framework runs."""
    if device == "virtual":
        from memplug.predict.virtual import VirtualDevice
        from tests.support.virtual_devices import SIMPLE

        VirtualDevice(SIMPLE)
    if framework == "zero":
        import deepspeed

        # DeepSpeed would first compile a shared-memory all-reduce, which takes half a minute
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if framework == "megatron":
        from tests.support import megatron_worker

        if device == "cpu":
            megatron_worker.prepare()
        else:
            sys.path.insert(0, str(megatron_worker.RECIPE))


def main() -> None:
    """Run the programs of the command line, and write each rank's requests."""
    device, folder, names = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    framework = names[0].partition("-")[0]
    _prepare(device, framework)
    both = device == "virtual" and framework == "megatron"
    for rank in range(2) if both else [int(os.environ.get("RANK", "0"))]:
        with contextlib.nullcontext() if framework == "llama" else _on(device, framework == "megatron", rank):
            found = {name: _program(name, device)() for name in names}
        (folder / f"{device}-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
