"""Adapts Megatron-Core: finds its layers, refuses conflicting options, keeps gathering and losses out of regions.

| patched | on | why |
|---|---|---|
| `forward_step`, `backward_step` | `pipeline_parallel.schedules` | micro-batches; a note on an out-of-memory error |
| `get_tensor` | the global memory buffer | slicing scratch memory that layers share is no part of a region |
| `start_param_sync`, `finish_param_sync` | DDP's class of bucket groups | gathering parameters is no part of a region |
| `save_to_aux_losses_tracker` | `moe.router`, up to 0.17 | a recompute pass must not log a loss twice |
| `MoEMetricsTracker.record` | `moe.moe_logging`, from 0.18 | a recompute pass must not log a loss twice |

These symbols exist in megatron-core 0.16 to 0.20. Each patch carries a mark and the original function;
`Session.detach` undoes it.

How memplug handles a layer depends on the layer's components:

| component | swapped, recomputed | tested on |
|---|---|---|
| Megatron-Core's linear layers, SDPA or unfused attention | row by row | CPU |
| SequentialMLP, all-gather and all-to-all dispatchers | row by row, in permuted order; collectives captured | CPU |
| flash-attn 2 (has operators) | attention whole, the rest row by row | H200 |
| flash-attn 3 (has operators since November 2025) | attention whole, the rest row by row | stand-ins |
| grouped matmul (`torch._grouped_mm`) | row by row | CPU, outside of Megatron-Core |
| modules of Transformer Engine, FP8 or not | each saved tensor by itself (transformer_engine.py) | H200 |
| other fused kernels, GroupedMLP | each saved tensor by itself (memplug/tokenwise/engine/hidden.py) | stand-ins |
| DeepEP and HybridEP (flex dispatcher) | exchanged tensors are captured, and not exchanged again | stand-ins |
"""

from __future__ import annotations

import collections
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from memplug.config import MemplugConfig
from memplug.errors import ConfigError, ConflictError, PatchError, RegionError, UnsupportedVersionError
from memplug.hooks import checkpointing, random_states
from memplug.hooks.framework import AttachTarget, Framework, Layers, instances, outermost
from memplug.hooks.patching import patch, unnoticed
from memplug.hooks.regions import Call, Prepare
from memplug.session.attached import AttachedModel
from memplug.session.ranks import Ranks
from memplug.tokenwise.engine.tape import storage_of

log = logging.getLogger("memplug")

VERSIONS = "megatron-core 0.16 to 0.20"
OLDEST, NEWEST = (0, 16), (0, 20)
LAYER_CLASS = "megatron.core.transformer.transformer_layer.TransformerLayer"

_RECOMPUTES = "recompute_granularity"

_CONFLICTS = {
    _RECOMPUTES: "memplug recomputes the same layers: leave out --recompute-granularity, or let memplug replace it: "
    '"tokenwise": {"checkpointing": "replace"}',
    "cpu_offloading": "memplug takes its place: leave out --cpu-offloading-num-layers",
    "fine_grained_activation_offloading": "memplug takes its place: leave out --fine-grained-activation-offloading",
    "enable_cuda_graph": "memplug cannot observe operators in a captured graph: leave out --enable-cuda-graph",
    "external_cuda_graph": "memplug cannot observe operators in a captured graph: leave out --external-cuda-graph",
    "cuda_graph_impl": "memplug cannot observe operators in a captured graph: give --cuda-graph-impl none",
    "moe_paged_stash": "its own hooks move the tensors that experts save for backward: leave out --moe-paged-stash",
    "overlap_moe_expert_parallel_comm": "its schedule interleaves parts of two layers, and calls no layer's forward: "
    "leave out --overlap-moe-expert-parallel-comm",
    "hybrid_context_parallel": "the ranks that share a sequence change with every micro-batch, and each would "
    "recompute by a plan of its own: leave out --hybrid-context-parallel",
}


class Megatron(Framework):
    """Megatron-Core's layers, schedules and parallel groups."""

    def claim(self, given: Any) -> AttachTarget | None:
        """Return the attach target if `given` is a list of modules (one Megatron-Core model's chunks), else None."""
        if not isinstance(given, (list, tuple)) or not given or not all(isinstance(part, nn.Module) for part in given):
            return None
        check_chunks(given)
        return AttachTarget(nn.ModuleList(given), tuple(given))

    def is_in(self, target: AttachTarget) -> bool:
        """Return whether the target has Megatron-Core layers."""
        return bool(self.layers(target.model))

    def layers(self, model: nn.Module) -> Layers:
        """Return the model's outermost transformer layers."""
        return outermost(instances(model, LAYER_CLASS))

    def is_expert(self, module: nn.Module) -> bool:
        """Return whether a module is one of Megatron-Core's expert MLPs."""
        return type(module).__name__ in ("SequentialMLP", "GroupedMLP", "TEGroupedMLP")

    def groups(self, target: AttachTarget) -> Sequence[Any]:
        """Return all ranks of the job, since Megatron-Core makes its parallel groups from all of them."""
        return [list(range(dist.get_world_size()))] if dist.is_initialized() else []

    def check_block(self, config: MemplugConfig, ranks: Ranks) -> None:
        """Raise `ConfigError` if ranks have different blocks, since their layers would run different collectives."""
        blocks = ranks.gather(config.model_dump(mode="json"), patient=True)
        others = [index for index, block in enumerate(blocks) if block != blocks[0]]
        if others:
            keys = sorted(key for key in blocks[0] if blocks[0][key] != blocks[others[0]][key])
            first, other = ranks.members[0], ranks.members[others[0]]
            raise ConfigError(
                [f'the "memplug" block of rank {other} differs from that of rank {first}, in {", ".join(keys)}'],
                "Give all ranks the same file.",
            )

    def layout(self, target: AttachTarget) -> Mapping[str, int]:
        """Return the sizes of the parallel groups, and the pipeline rank, which determines the forwards in flight."""
        state = _module("megatron.core.parallel_state")
        if not state.model_parallel_is_initialized():
            return {}
        return {
            "context_parallel": state.get_context_parallel_world_size(),
            "expert_parallel": state.get_expert_model_parallel_world_size(),
            "pipeline_parallel": state.get_pipeline_model_parallel_world_size(),
            "pipeline_rank": state.get_pipeline_model_parallel_rank(),
            "tensor_parallel": state.get_tensor_model_parallel_world_size(),
        }

    def check(self, target: AttachTarget, modules: Layers, config: MemplugConfig) -> None:
        """Raise an error if Megatron-Core itself is set to offload, recompute or graph-capture (CUDA) the layers.

        If the block lets memplug replace recomputation, recomputation is no error: `hook` switches it off.
        """
        check_version()
        replaced = {_RECOMPUTES} if config.tokenwise.checkpointing == "replace" else set()
        for name, layer in self.layers(target.model):
            reasons = [
                f"{key}={value!r}: {why}"
                for key, why in _CONFLICTS.items()
                if key not in replaced and (value := getattr(layer.config, key, None)) not in (None, False, "none")
            ]
            if reasons:
                raise ConflictError(
                    f"layer {name} is handled by Megatron-Core too: {'; '.join(reasons)}",
                    "Change these options as said above.",
                    code="MP002",
                )
            _check_kernels(name, layer.config)
            if not inspect.isfunction(inspect.unwrap(type(layer).forward)) or hasattr(layer, "cudagraph_manager"):
                raise RegionError(
                    f"the forward of layer {name}, a {type(layer).__name__}, is no plain method: memplug cannot run it "
                    "as a region",
                    "Attach before it is compiled, scripted or captured.",
                    code="MP003",
                )

    def prepare(self, target: AttachTarget, name: str, config: MemplugConfig) -> Prepare:
        """Return the function that checks a layer's arguments."""
        return arguments

    def hook(self, target: AttachTarget, modules: Layers, attached: AttachedModel) -> None:
        """Patch the schedules, the memory buffer, the losses and the gathering of parameters."""
        _hook_schedules(attached)
        _hook_memory_buffer(attached)
        _hook_losses(attached)
        _hook_gathering(attached)
        if modules and checkpointing.replaces(attached):
            _replace_recomputation(target.model, modules, attached)
        attached.executor.hooks.surroundings.append(
            lambda: random_states.kept(_module("megatron.core.tensor_parallel.random").get_cuda_rng_tracker())
        )


def check_chunks(chunks: Sequence[nn.Module]) -> None:
    """Check that the modules are the chunks of one Megatron-Core model.

    Raises:
        RegionError: a chunk is in the list twice, has no layers, or belongs to another model.
    """
    if len({id(chunk) for chunk in chunks}) < len(chunks):
        raise RegionError("the same model chunk is in the list twice", "Pass each chunk of the model once.")
    shapes = []
    for number, chunk in enumerate(chunks):
        layers = outermost(instances(chunk, LAYER_CLASS))
        if not layers:
            raise RegionError(
                f"chunk {number} of the list, a {type(chunk).__name__}, has no Megatron-Core transformer layers",
                "A list is for the chunks of one Megatron-Core model, as `get_model` returns it; attach to other "
                "models one by one.",
            )
        config = layers[0][1].config
        shapes.append((config.num_layers, config.hidden_size, config.pipeline_model_parallel_size))
    if len(set(shapes)) > 1:
        raise RegionError(
            f"the chunks belong to several models: (layers, hidden size, pipeline size) are {shapes}",
            "Attach to each model by itself.",
        )


def _check_kernels(name: str, config: Any) -> None:
    """Raise `ConflictError` if an option selects kernels whose writes or communication memplug cannot observe."""
    if getattr(config, "multi_latent_attention", False) and getattr(config, "apply_rope_fusion", False):
        raise ConflictError(
            f"the rotary embedding of layer {name} writes to queries in place, in a kernel that memplug cannot observe",
            "Leave out --apply-rope-fusion with multi-latent attention.",
        )
    if getattr(config, "moe_flex_dispatcher_backend", None) == "ncclep":
        raise ConflictError(
            f"the experts of layer {name} exchange tokens in kernels that memplug cannot observe: a recompute pass "
            "could exchange on one rank alone",
            "Use --moe-flex-dispatcher-backend deepep or hybridep, or the all-to-all dispatcher.",
        )


def check_version() -> None:
    """Raise `UnsupportedVersionError` if Megatron-Core is too old; warn if it is newer than the known versions."""
    text = str(getattr(sys.modules.get("megatron.core"), "__version__", "0.16"))
    version = tuple(int(part) for part in text.split(".")[:2])
    if version < OLDEST:
        raise UnsupportedVersionError(f"megatron-core {text} is installed; memplug supports {VERSIONS}")
    if version > NEWEST:
        log.warning(
            "memplug: megatron-core %s is newer than the versions that memplug knows (%s): if training fails, install "
            "one of those",
            text,
            VERSIONS,
        )


def arguments(
    module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Call, tuple[Any, ...], dict[str, Any]]:
    """Return a layer's forward and arguments unchanged, after checking that they are for training.

    Raises:
        ConflictError: the arguments have an inference context, whose cache a recompute pass would fill a second time.
    """
    if kwargs.get("inference_context") is not None or kwargs.get("inference_params") is not None:
        raise ConflictError(
            "a Megatron-Core layer runs with an inference context and with gradients",
            "Run inference under `torch.no_grad()`.",
        )
    return call, args, kwargs


def _replace_recomputation(model: nn.Module, modules: Layers, attached: AttachedModel) -> None:
    """Switch Megatron-Core's own recomputation off until the session detaches.

    For "full" recomputation, modules read the configuration in each forward. For "selective" recomputation, their
    constructors have set flags.
    """
    changed: list[tuple[Any, str, Any]] = []
    # a heterogeneous model has a configuration for each layer, and that of its block
    configs = {id(config): config for config in map(_config, model.modules()) if getattr(config, _RECOMPUTES, None)}
    if not configs:
        return
    asked = sorted({getattr(config, _RECOMPUTES) for config in configs.values()})
    for config in configs.values():
        changed.append((config, _RECOMPUTES, getattr(config, _RECOMPUTES)))
    for module in model.modules():
        flags = [name for name, value in vars(module).items() if value is True and _is_recompute_flag(name)]
        changed += [(module, name, True) for name in flags]
    for owner, name, value in changed:
        object.__setattr__(owner, name, None if value is not True else False)

    def undo() -> None:
        for owner, name, value in changed:
            object.__setattr__(owner, name, value)

    attached.at_detach(undo)
    checkpointing.tell(attached, f"--recompute-granularity {', '.join(asked)}")
    if "full" in asked and (kept := _beside_regions(model, modules)):
        named = ", ".join(f"{count} {name}" for name, count in sorted(kept.items()))
        attached.tell_once(
            f"layers that are no regions ({named}) keep all that they save for backward; if that is too much: "
            '"tokenwise": {"enabled": false}'
        )


def _beside_regions(model: nn.Module, modules: Layers) -> collections.Counter[str]:
    """Count the layers of the regions' stacks that are no regions, such as a hybrid model's Mamba, by class."""
    regions = {id(module) for _, module in modules}
    stacks = [stack for stack in model.modules() if isinstance(stack, nn.ModuleList)]
    return collections.Counter(
        type(layer).__name__
        for stack in stacks
        if any(id(layer) in regions for layer in stack)
        for layer in stack
        if id(layer) not in regions and any(True for _ in layer.parameters())
    )


def _config(module: nn.Module) -> Any:
    return vars(module).get("config")


def _is_recompute_flag(name: str) -> bool:
    return "recompute" in name or name == "checkpoint_core_attention"


def _hook_schedules(attached: AttachedModel) -> None:
    schedules = _module("megatron.core.pipeline_parallel.schedules")
    executor = attached.executor

    def forward_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # the next backward may be of an earlier micro-batch than the latest forward
        executor.flow.begin_micro_batch()
        with attached.explaining("forward of a micro-batch"):
            return original(*args, **kwargs)

    def backward_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with attached.explaining("backward of a micro-batch"):
            return original(*args, **kwargs)

    patch(schedules, "forward_step", forward_step, attached, VERSIONS)
    patch(schedules, "backward_step", backward_step, attached, VERSIONS)


def _hook_memory_buffer(attached: AttachedModel) -> None:
    """Keep scratch memory that layers share (for gathered sequences, unfused attention scores) out of the regions."""
    state = _module("megatron.core.parallel_state")
    if getattr(state, "_GLOBAL_MEMORY_BUFFER", None) is None:
        return  # model parallelism was not initialized, so no layer asks for the buffer
    buffer, executor = state.get_global_memory_buffer(), attached.executor
    patch(buffer, "get_tensor", unnoticed, attached, VERSIONS)

    def is_scratch(tensor: torch.Tensor) -> bool:
        return any(storage_of(tensor) == storage_of(one) for one in buffer.buffer.values())

    executor.hooks.scratch.append(is_scratch)


def _hook_losses(attached: AttachedModel) -> None:
    executor = attached.executor

    def record(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return None if executor.recomputing else unnoticed(original, *args, **kwargs)

    router = _module("megatron.core.transformer.moe.router")
    if hasattr(router, "save_to_aux_losses_tracker"):
        patch(router, "save_to_aux_losses_tracker", record, attached, VERSIONS)
    else:
        logging_of_losses = _module("megatron.core.transformer.moe.moe_logging")
        patch(logging_of_losses.MoEMetricsTracker, "record", record, attached, VERSIONS)


def _hook_gathering(attached: AttachedModel) -> None:
    """Keep the distributed optimizer's gathering of parameters, which module hooks start, out of the regions."""
    groups = _module("megatron.core.distributed.param_and_grad_buffer")._ParamAndGradBucketGroup
    patch(groups, "start_param_sync", unnoticed, attached, VERSIONS)
    patch(groups, "finish_param_sync", unnoticed, attached, VERSIONS)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PatchError(name, VERSIONS) from error
