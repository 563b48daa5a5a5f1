"""Adapts DeepSpeed: reads the block, marks steps, and keeps ZeRO 3's gathering out of the regions.

| patched | on | why |
|---|---|---|
| `deepspeed.initialize` | the module, by `install` | to attach to the engine that it returns |
| `step`, `train_batch` | the engine instance (`train_batch`: a pipeline engine) | the end of a training step |
| `allreduce_gradients` | the engine instance | its operators vary with the number of ranks: no part of the program |
| `destroy` | the engine instance | the session ends with the engine |
| `backward` | the engine instance | a note on an out-of-memory error |
| `compile` | the engine instance, by `deep_compile` | to refuse DeepCompile |
| `pre_` and `post_sub_module_forward_function` | ZeRO 3's `parameter_offload` | gathering is no part of a region |
| `pre_` and `post_sub_module_backward_function` | ZeRO 3's `parameter_offload` | to know what backward has gathered |
| `_all_gather`, `_partition` | `zero.partition_parameters.Init` | gathering external parameters is no part of regions |

`install` skips engines that have no optimizer, since they do not train (a reference or teacher model's, for example).

These symbols exist in deepspeed 0.16.5 to 0.19. Each patch carries a mark and the original function; `uninstall` or
`Session.detach` undoes it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from memplug.config import MemplugConfig, read_ds_config
from memplug.ds_json.keys import offloads_of
from memplug.errors import ConflictError, PatchError, UnsupportedVersionError
from memplug.hooks import deep_compile
from memplug.hooks.framework import AttachTarget, Framework, Layers
from memplug.hooks.patching import ORIGINAL, is_patched, patch, put_back, uncompared, unnoticed, wrapped
from memplug.session import report
from memplug.session.attached import AttachedModel
from memplug.session.session import Session
from memplug.tokenwise.engine.region import Region

log = logging.getLogger("memplug")

VERSIONS = "deepspeed 0.16.5 to 0.19"


class DeepSpeed(Framework):
    """DeepSpeed's engines, their configuration and their steps."""

    def claim(self, given: Any) -> AttachTarget | None:
        """Return the attach target if `given` is a DeepSpeed engine, else None."""
        if not is_engine(given):
            return None
        return AttachTarget(given.module, (given.module,), given, torch.device(given.device))

    def is_in(self, target: AttachTarget) -> bool:
        """Return whether a DeepSpeed engine drives the target."""
        return is_engine(target.engine)

    def is_expert(self, module: nn.Module) -> bool:
        """Return whether a module is DeepSpeed's `Experts`."""
        return type(module).__name__ == "Experts"

    def block(self, target: AttachTarget) -> MemplugConfig:
        """Return the "memplug" block of the engine's configuration."""
        return read_block(target.engine)

    def explain_off(self, target: AttachTarget) -> None:
        """Warn if the engine's configuration has no "memplug" block."""
        if not has_block(target.engine):
            log.warning(
                'memplug: off: the engine\'s configuration has no "memplug" block; add one, or pass {"enabled": True} '
                "to `memplug.attach`"
            )

    def check_attached(self, target: AttachTarget) -> None:
        """Raise `ConflictError` if the existing session was attached to the model, and so misses the engine's steps."""
        if not is_patched(target.engine, "step"):
            raise ConflictError(
                "a session is attached to the engine's model alone, and does not see the engine's steps",
                "Detach that session and attach to the engine, or leave it to `memplug.install()`.",
            )

    def check(self, target: AttachTarget, modules: Layers, config: MemplugConfig) -> None:
        """Raise `ConflictError` if DeepSpeed's activation checkpointing is configured, and the block refuses it."""
        if config.tokenwise.checkpointing == "replace":
            return
        checkpointing = sys.modules.get("deepspeed.runtime.activation_checkpointing.checkpointing")
        if checkpointing is not None and checkpointing.is_configured():
            raise ConflictError(
                "DeepSpeed's activation checkpointing is configured, and memplug recomputes the same layers",
                "Leave out the call of `deepspeed.checkpointing.configure` and the model's use of "
                "`deepspeed.checkpointing.checkpoint`: memplug takes their place.",
                code="MP002",
            )

    def check_states(self, target: AttachTarget) -> None:
        """Raise `ConflictError` if DeepSpeed offloads optimizer states or parameters."""
        offloads = " and ".join(offloads_of(_configuration(target.engine)))
        if offloads:
            raise ConflictError(
                f'DeepSpeed already offloads ({offloads}), and "swap": {{"states": true}} would move the same tensors',
                "Remove one of the two. If device memory runs out in the optimizer, keep DeepSpeed's: memplug's does "
                "not help there.",
            )

    def groups(self, target: AttachTarget) -> Sequence[Any]:
        """Return the engine's data-parallel group; without one, or with an `mpu` (model parallelism), all ranks."""
        engine = target.engine
        group = getattr(engine, "seq_data_parallel_group", None) or getattr(engine, "data_parallel_group", None)
        if getattr(engine, "mpu", None) is None and group is not None:
            return [group]
        return [list(range(dist.get_world_size()))] if dist.is_initialized() else []

    def regathers(self, target: AttachTarget) -> bool:
        """Return whether the engine uses ZeRO 3."""
        return target.engine.zero_optimization_stage() == 3

    def layout(self, target: AttachTarget) -> Mapping[str, int]:
        """Return the ZeRO stage and the number of micro-batches."""
        engine = target.engine
        return {
            "zero_stage": engine.zero_optimization_stage(),
            "micro_batches": engine.gradient_accumulation_steps(),
        }

    def hook(self, target: AttachTarget, modules: Layers, attached: AttachedModel) -> None:
        """Patch the engine to mark steps, explain out-of-memory errors, and keep gathering out of the regions."""
        engine = target.engine

        def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            steps = engine.global_steps  # the optimizer's; only the engine knows when gradient accumulation ends
            with attached.explaining("step"), attached.in_optimizer():
                result = original(*args, **kwargs)
            # ZenFlow updates some weights in each step, and counts only the steps that update all
            if engine.global_steps != steps or getattr(engine, "zenflow", False):
                attached.step()
            return result

        def optimizer_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return step(functools.partial(uncompared, original), *args, **kwargs)

        def backward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with attached.explaining("backward"):
                return original(*args, **kwargs)

        def destroy(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            attached.detach()
            return original(*args, **kwargs)

        attached.steps_are_marked = True
        patch(engine, "step", optimizer_step, attached, VERSIONS)
        patch(engine, "allreduce_gradients", uncompared, attached, VERSIONS)
        patch(engine, "destroy", destroy, attached, VERSIONS)
        if hasattr(type(engine), "train_batch"):
            patch(engine, "train_batch", step, attached, VERSIONS)
        patch(engine, "backward", backward, attached, VERSIONS)
        deep_compile.refuse(engine, attached, VERSIONS)
        if self.regathers(target):
            named = dict(modules)
            _hook_gathering(engine, attached, named)
            _hook_external_parameters(attached, named)
        monitor = getattr(engine, "monitor", None)
        if attached.config.report.monitor and getattr(monitor, "enabled", False):
            attached.on_step.append(
                lambda: monitor.write_events(report.monitor_events(attached.report(), engine.global_samples))
            )


def install(
    attach: Callable[..., Session],
    config: MemplugConfig | None = None,
    off: Callable[[str], None] = lambda reason: None,
) -> None:
    """Patch `deepspeed.initialize` to attach to the engine that it returns; a second call does nothing.

    The patch leaves an engine alone if it has no optimizer, or if it has no block and `config` is None. An engine whose
    block is off (`"enabled": false`, or no technique enabled) makes `initialize` remove the patch.

    Args:
        attach: called with the engine, and with its block or `config`.
        config: the block for engines whose configuration has none; None to leave them alone.
        off: called with the reason if an engine is left alone; "" if its block is off.

    Raises:
        UnsupportedVersionError: DeepSpeed cannot be imported.
        PatchError: this DeepSpeed has no `initialize`.
    """
    try:
        import deepspeed
    except ImportError as error:
        raise UnsupportedVersionError(
            f"memplug attaches to DeepSpeed's engines, and DeepSpeed cannot be imported: {error}",
            "Run `pip install 'memplug[deepspeed]'`. Trainer and Lightning have callbacks (memplug.integrations), "
            "Megatron-LM's scripts start with `memplug run`, and other loops call `memplug.attach(model)`.",
        ) from None

    original = getattr(deepspeed, "initialize", None)
    if original is None:
        raise PatchError("deepspeed.initialize", VERSIONS)
    if hasattr(original, ORIGINAL):
        return

    tell = functools.cache(log.info)

    def initialize(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        block = read_block(result[0])  # also warns of a misspelt block
        if not has_block(result[0]):
            block = config
        elif config is not None and config != block:
            tell('memplug: the engine\'s own "memplug" block is in force, not that of --config')
        if block is None:
            log.debug('memplug: off for this engine, whose configuration has no "memplug" block')
            off('the engine\'s configuration has no "memplug" block, and no --config was given')
        elif not block.active:
            uninstall()
            log.debug('memplug: off: the "memplug" block says so')
            off("")
        elif not trains(result[0]):
            log.info("memplug: off for this engine, which has no optimizer: nothing is trained with it")
            off("the engine has no optimizer")
        else:
            attach(result[0], block)
        return result

    deepspeed.initialize = wrapped(original, initialize)


def uninstall() -> None:
    """Restore the original `deepspeed.initialize`; sessions stay attached."""
    put_back(sys.modules.get("deepspeed"), "initialize")


def is_engine(target: Any) -> bool:
    """Return whether the target is a DeepSpeed engine, without importing DeepSpeed."""
    engine = sys.modules.get("deepspeed.runtime.engine")
    return engine is not None and isinstance(target, engine.DeepSpeedEngine)


def read_block(engine: Any) -> MemplugConfig:
    """Return the "memplug" block of an engine's configuration.

    Raises:
        PatchError: the engine read its configuration from a file, and has no `_config._param_dict`.
    """
    return read_ds_config(_configuration(engine))


def has_block(engine: Any) -> bool:
    """Return whether an engine's configuration has a "memplug" block."""
    return "memplug" in _configuration(engine)


def _configuration(engine: Any) -> Mapping[str, Any]:
    if isinstance(engine.config, Mapping):
        return engine.config
    read = getattr(getattr(engine, "_config", None), "_param_dict", None)
    if read is None:
        raise PatchError("engine._config._param_dict", VERSIONS)
    return read


def trains(engine: Any) -> bool:
    """Return whether an engine has an optimizer that is not one of DeepSpeed's placeholders."""
    optimizer = getattr(engine, "basic_optimizer", engine.optimizer)
    return type(optimizer).__name__ not in ("NoneType", "DummyOptim", "DeepSpeedZeRoOffload")


def _hook_gathering(engine: Any, attached: AttachedModel, modules: Mapping[str, nn.Module]) -> None:
    """Adapt regions to ZeRO 3, which gathers parameters around every module.

    Gathering stays out of the regions. A region's parameters are gathered once for its recompute pass. The pass runs
    inside a module's backward. It does not release parameters that backward has gathered, since backward still needs
    them.
    """
    # `engine.optimizer` of an engine that does not train is the `DeepSpeedZeRoOffload` itself
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    if not hasattr(offload, "pre_sub_module_forward_function"):
        raise PatchError("engine.optimizer.parameter_offload", VERSIONS)
    in_backward: set[int] = set()
    attached.on_step.append(in_backward.clear)
    executor = attached.executor

    def after_forward(original: Callable[..., Any], module: Any) -> Any:
        if executor.recomputing and module.ds_id in in_backward:
            return None
        return unnoticed(original, module)

    def before_backward(original: Callable[..., Any], module: Any) -> Any:
        in_backward.add(module.ds_id)
        return uncompared(original, module)

    def after_backward(original: Callable[..., Any], module: Any) -> Any:
        in_backward.discard(module.ds_id)
        return uncompared(original, module)

    @contextlib.contextmanager
    def gathered(region: Region) -> Iterator[None]:
        """Gather the parameters of all modules of the region, in the same order on each rank, as DeepSpeed requires."""
        owners = list(_owners(modules[region.name]))
        for module in owners:
            offload.pre_sub_module_forward_function(module)
        try:
            yield
        finally:
            for module in owners:
                if module.ds_id not in in_backward:
                    offload.post_sub_module_forward_function(module)

    executor.hooks.gathered.append(gathered)
    patch(offload, "pre_sub_module_forward_function", unnoticed, attached, VERSIONS)
    patch(offload, "post_sub_module_forward_function", after_forward, attached, VERSIONS)
    patch(offload, "pre_sub_module_backward_function", before_backward, attached, VERSIONS)
    patch(offload, "post_sub_module_backward_function", after_backward, attached, VERSIONS)


def _owners(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and all modules in it, except inside a leaf (`_z3_leaf`), which DeepSpeed gathers as a whole."""
    yield module
    if not getattr(module, "_z3_leaf", False):
        for child in module.children():
            yield from _owners(child)


def _hook_external_parameters(attached: AttachedModel, modules: Mapping[str, nn.Module]) -> None:
    """Adapt regions to ZeRO 3's external parameters, which a module reads from another module or returns.

    When the first forward reads such a parameter, DeepSpeed assigns it to the module on top of its stack of running
    modules; from then on, it gathers the parameter before that module runs. A recompute pass does not call the region's
    module, so memplug puts the module on the stack.
    """
    partitioning = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
    patch(partitioning.Init, "_all_gather", unnoticed, attached, VERSIONS)
    patch(partitioning.Init, "_partition", unnoticed, attached, VERSIONS)

    running = importlib.import_module("deepspeed.runtime.zero.parameter_offload").FWD_MODULE_STACK

    @contextlib.contextmanager
    def around(phase: str, region: Region) -> Iterator[None]:
        if phase != "recompute":
            yield
            return
        before = list(running)
        running.append(modules[region.name])
        try:
            yield
        finally:
            running[:] = before

    attached.executor.hooks.around.append(around)
