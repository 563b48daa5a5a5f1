"""Hooks that tell a recorder where training is: in a micro-batch's forward, in a layer, or in the optimizer.

The hooks are installed while steps are recorded or served by the arena; other steps pay nothing. Backward needs no
hooks, since the recorder knows which forward made each autograd node.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as optimizers

from memplug.hooks.framework import outermost
from memplug.hooks.frameworks import holds_experts
from memplug.hooks.job import job_of
from memplug.hooks.tracing import nothing, outside
from memplug.profile.recorder import Recorder
from memplug.profile.trace import Fingerprint, Layer
from memplug.torch_private import COMPILED_CALL, current_graph_task_id


class Places:
    """The hooks that report one model's places.

    Args:
        model: the whole model.
        layers: (name, module) of the layers to which the recorder attributes memory. If a layer contains a mixture of
            experts, the experts become layers of their own. These are dynamic: the sizes of their tensors depend on
            data.
        recorder: the recorder that receives the reports.
        chunks: the chunks of a pipeline stage, by default the model; each forward of a chunk counts as one micro-batch.
        job: fingerprint of the job, by default made from the model and its layers.

    Attributes:
        layers: names of the layers, and whether they are dynamic, by the recorder's index of the layer.
        inputs: shapes and dtypes of the inputs of the model's forwards, one text for each forward.
        gradients_stay: True if parameters had gradients when the last recorded step began.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[tuple[str, nn.Module]],
        recorder: Recorder,
        chunks: Sequence[nn.Module] | None = None,
        job: Fingerprint | None = None,
    ):
        self._chunks = [model] if chunks is None else list(chunks)
        self._recorder = recorder
        self._job = job or job_of(self._chunks[0], model, layers, recorder.device)
        self._modules = _with_experts(layers)
        self.layers = tuple(Layer(name, dynamic) for name, _, dynamic in self._modules)
        self.inputs: list[str] = []
        self.gradients_stay = False
        self._model = model
        self._micro_batch = 0
        self._hooks = recorder.place_hooks()
        self._removals: list[Callable[[], Any]] = []

    def install(self) -> None:
        """Install the hooks at the beginning of a step, and count its micro-batches from 0."""
        self._micro_batch = 0
        self.inputs.clear()
        self._hooks.clear()
        if self._removals:
            return
        begin, leave = (outside(call, nothing) for call in (self.begin_forward, self._leave_forward))
        inlined: set[nn.Module] = set()  # Dynamo runs hooks of these only if they were there when it compiled
        for chunk in self._chunks:
            self._removals += _hooked(chunk, begin, leave)
            inlined |= {*chunk.modules()} if COMPILED_CALL in chunk.__dict__ else set()
        for index, (_, module, _) in enumerate(self._modules):
            if module not in inlined:
                enter, leave = (outside(hook, nothing) for hook in self._hooks.layer_hooks(index))
                self._removals += _hooked(module, enter, leave)
        # torch calls these hooks for all optimizers; they keep neither model nor session alive, and are removed with
        # this object
        for handle in (
            optimizers.register_optimizer_step_pre_hook(_weakly(self._begin_optimizer)),
            optimizers.register_optimizer_step_post_hook(_weakly(self._leave_optimizer)),
        ):
            self._removals.append(weakref.finalize(self, handle.remove))

    def remove(self) -> None:
        """Remove all hooks; a second call does nothing."""
        while self._removals:
            self._removals.pop()()

    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of the job and of the inputs of the model's forwards since `install`."""
        return replace(self._job, inputs=tuple(self.inputs))

    def begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Report that a chunk's forward begins."""
        recomputes = current_graph_task_id() != -1
        if torch.is_grad_enabled() and not recomputes:
            if self._micro_batch == 0 and self._recorder.recording:
                self.gradients_stay = any(parameter.grad is not None for parameter in self._model.parameters())
            tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
            self._hooks.enter_forward(self._micro_batch, [size for tensor in tensors for size in tensor.shape])
            self._micro_batch += 1
            self.inputs.append(shapes(tensors))
        elif recomputes:  # gradient checkpointing around the model runs it again: no new micro-batch
            self._hooks.enter_recompute()
        else:
            self._hooks.enter_no_grad()

    @contextlib.contextmanager
    def in_optimizer(self) -> Iterator[None]:
        """Attribute all of an engine's `step` to the optimizer, not only the `step` of the engine's optimizer."""
        self._hooks.enter_engine_step()
        try:
            yield
        finally:
            self._hooks.leave_engine_step()

    def _leave_forward(self, *_: Any) -> None:
        self._hooks.leave_model()

    def _begin_optimizer(self, *_: Any) -> None:
        self._hooks.enter_optimizer()

    def _leave_optimizer(self, *_: Any) -> None:
        self._hooks.leave_optimizer()


def _hooked(module: nn.Module, enter: Callable[..., None], leave: Callable[..., None]) -> list[Callable[[], Any]]:
    """Call `enter(module, args, kwargs)` before the module's forwards and `leave` after them; return what undoes this.

    A compiled module has the two calls around the compiled one, whenever it was compiled.
    """
    compiled = module.__dict__.get(COMPILED_CALL)
    if compiled is None:
        before = module.register_forward_pre_hook(enter, with_kwargs=True)
        return [before.remove, module.register_forward_hook(leave, always_call=True).remove]

    def call(*args: Any, **kwargs: Any) -> Any:
        enter(module, args, kwargs)
        try:
            return compiled(*args, **kwargs)
        finally:
            leave(module, args, None)

    def undo() -> None:
        if module.__dict__.get(COMPILED_CALL) is call:  # else it was compiled again
            setattr(module, COMPILED_CALL, compiled)

    setattr(module, COMPILED_CALL, call)
    return [undo]


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls the method as long as its object exists."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        bound = reference()
        if bound is not None:
            bound(*arguments)

    return call


def _with_experts(layers: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module, bool]]:
    found: list[tuple[str, nn.Module, bool]] = []
    for name, layer in layers:
        found.append((name, layer, holds_experts(layer)))
        for inner, module in outermost([each for each in layer.named_modules() if holds_experts(each[1])]):
            if inner:
                # a list of experts is never called itself, but its members are
                members = module.named_children() if isinstance(module, nn.ModuleList) else [("", module)]
                found += [(".".join(filter(None, (name, inner, part))), member, True) for part, member in members]
    return found


def shapes(values: Sequence[Any]) -> str:
    """Return shapes and dtypes of the tensors among a forward's arguments, such as "int64[4, 512]"."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return ", ".join(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors)
