"""A stack of Llama decoder layers, and a function for each mode of tests/bench/cases.py that prepares its training."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import yaml
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import memplug
from tests.bench.cases import OWN, Case
from tests.support.folders import ROOT

SHAPES = ROOT / "configs" / "models"
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "default": None}
PROJECTIONS = 4  # products of each gradient with random directions

Layer = Callable[[torch.Tensor], torch.Tensor]
Apply = Callable[[Layer, torch.Tensor], torch.Tensor]


class Stack(nn.Module):
    """Decoder layers without embedding and head.

    Parameters and input depend only on the arguments: fp32 on the CPU, else bf16.

    Args:
        shape: Fields of Hugging Face's LlamaConfig, as in configs/models.
        tokens: Tokens of the one sequence.
        device: torch's name of the device.
    """

    def __init__(self, shape: dict[str, Any], tokens: int, device: str):
        super().__init__()
        config = LlamaConfig(**shape, attn_implementation="sdpa")
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        torch.manual_seed(0)
        with torch.device(device):
            layers = range(config.num_hidden_layers)
            self.layers = nn.ModuleList([LlamaDecoderLayer(config, index).to(dtype) for index in layers])
            self.input = torch.randn(1, tokens, config.hidden_size, dtype=dtype).requires_grad_()
            positions = LlamaRotaryEmbedding(config)(self.input, torch.arange(tokens)[None])
        self.positions = tuple(positions)
        self.train()

    def forward(self, apply: Apply) -> torch.Tensor:
        """Run every layer through `apply`. Like an embedding's output, the first layer's input is no leaf."""
        hidden = self.input.clone()
        for layer in self.layers:
            hidden = apply(functools.partial(self._layer, layer), hidden)
        return hidden

    def _layer(self, layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        out = layer(hidden, attention_mask=None, position_embeddings=self.positions)
        return out[0] if isinstance(out, tuple) else out


@dataclass
class Run:
    """A stack that is ready to train in one mode."""

    stack: Any  # a `Stack`, or Megatron-Core's
    apply: Apply = lambda layer, hidden: layer(hidden)
    around: Callable[[], Any] = contextlib.nullcontext  # around forward and backward
    session: Any = None
    warm_up: int = 2
    attention: Callable[[], Any] = field(default=contextlib.nullcontext)

    def step(self) -> None:
        """Run forward and backward."""
        with self.attention(), self.around():
            self.stack(self.apply).backward(self.stack.input.detach())
        if self.session is not None:
            self.session.step()

    def clear_gradients(self) -> None:
        """Zero the gradients in place: their buffers exist for the whole training, as in DeepSpeed and Megatron."""
        for tensor in (*self.stack.parameters(), self.stack.input):
            if tensor.grad is not None:
                tensor.grad.zero_()

    def slabs(self) -> list[torch.Tensor]:
        """Return memplug's host memory."""
        return self.session._attached.executor.pool.slabs if self.session is not None else []

    def gradients(self) -> dict[str, list[float]]:
        """Return, for each gradient of the first layer, its norm and its products with fixed random directions."""
        found = {}
        for name, parameter in self.stack.layers[0].named_parameters():
            gradient = parameter.grad.float()
            generator = torch.Generator(gradient.device).manual_seed(1)
            found[name] = [gradient.norm().item()]
            for _ in range(PROJECTIONS):
                direction = torch.randn(gradient.shape, generator=generator, device=gradient.device)
                found[name].append((gradient * direction).sum().item())
        return found


@contextlib.contextmanager
def prepared(mode: str, case: Case) -> Iterator[Run]:
    """Make the stack of a case and prepare it to train in `mode`; undo everything afterwards."""
    if case.host != "transformers":
        from tests.bench import megatron

        run = Run(megatron.stack_of(case, mode.removeprefix("memplug_over:")))
    else:
        shape = yaml.safe_load((SHAPES / f"{case.model}.yaml").read_text())
        run = Run(Stack({**shape, "num_hidden_layers": case.layers}, case.tokens, case.device))
    backend = BACKENDS[case.attention]
    if case.device.startswith("cuda") and backend is not None:
        run.attention = functools.partial(sdpa_kernel, backend)
    base, _, alpha = mode.partition(":")
    try:
        if case.host == "transformers" or base in OWN:
            _PREPARE[base](run, case, alpha)
        yield run
    finally:
        if run.session is not None:
            run.session.detach()


def _full(run: Run, case: Case, alpha: str) -> None:
    run.apply = functools.partial(checkpoint, use_reentrant=False)


def _reentrant(run: Run, case: Case, alpha: str) -> None:
    run.apply = functools.partial(checkpoint, use_reentrant=True)


def _flag(run: Run, case: Case, alpha: str) -> None:
    for layer in run.stack.layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)


def _wrapper(run: Run, case: Case, alpha: str) -> None:
    for index, layer in enumerate(run.stack.layers):
        run.stack.layers[index] = checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT)


def _selective(run: Run, case: Case, alpha: str) -> None:
    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        attention = func.name().startswith("aten::_scaled_dot_product")
        return CheckpointPolicy.MUST_SAVE if attention else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    run.apply = functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)


def _save_on_cpu(run: Run, case: Case, alpha: str) -> None:
    run.around = functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=case.device != "cpu")


def _deepspeed(run: Run, case: Case, alpha: str) -> None:
    cuda = case.device.startswith("cuda")
    if not cuda:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    if not torch.distributed.is_initialized():
        # else DeepSpeed would compile this operator, though there is one rank
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        deepspeed.comm.init_distributed("gloo", auto_mpi_discovery=False, rank=0, world_size=1)
    deepspeed.checkpointing.configure(None, partition_activations=False, checkpoint_in_cpu=cuda)
    run.apply = deepspeed.checkpointing.checkpoint


def _memplug(run: Run, case: Case, alpha: str, arena: bool = True) -> None:
    tokenwise = {"alpha": float(alpha) if alpha else "auto", "min_offload_bytes": case.min_offload_bytes}
    profiler = {"warmup_steps": 0, "policy_steps": 5, "wait_for_plans": True}
    block = {"enabled": True, "plan_dir": False, "profiler": profiler, "tokenwise": tokenwise}
    block["arena"] = {"enabled": arena}
    if case.budget_bytes is not None:
        block["device_budget_gib"] = case.budget_bytes / 2**30
    if case.is_virtual:
        block["host_budget_gib"] = 100  # "auto" would be this machine's memory, and nothing is written there
    run.session = memplug.attach(run.stack, block)
    run.warm_up = 12  # one step is compared, one observed, some try plans, then addresses are planned


def _memplug_over(run: Run, case: Case, mode: str) -> None:
    if case.host == "transformers":
        _PREPARE[mode](run, case, "")
    _memplug(run, case, "")


_PREPARE: dict[str, Callable[[Run, Case, str], None]] = {
    "keep_all": lambda run, case, alpha: None,
    "full": _full,
    "reentrant": _reentrant,
    "flag": _flag,
    "wrapper": _wrapper,
    "selective": _selective,
    "save_on_cpu": _save_on_cpu,
    "deepspeed": _deepspeed,
    "memplug": _memplug,
    "memplug_torch": functools.partial(_memplug, arena=False),
    "memplug_over": _memplug_over,
}
