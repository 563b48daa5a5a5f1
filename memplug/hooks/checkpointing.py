"""Takes over the activation checkpointing that a script asks for around its regions.

| asked for by | while the session is attached |
|---|---|
| Hugging Face's flag `gradient_checkpointing`, however and whenever set | the layer runs without a checkpoint |
| `CheckpointWrapper` of torch, FSDP or torchtitan around a region | the region runs without a checkpoint |
| a reentrant `torch.utils.checkpoint`, or DeepSpeed's `checkpoint` | runs as torch's with `use_reentrant=False` |
| `torch.utils.checkpoint` with `use_reentrant=False` | runs as before: memplug can run regions inside it |

A reentrant checkpoint runs its function without gradients, and memplug cannot run a region without gradients. Whether a
function runs regions, memplug learns in the first checkpoint of that function. Code outside of the regions is
recomputed as the script asked, so a step needs no more memory than under the script's own checkpointing.
`memplug.hooks.megatron` replaces Megatron-Core's recomputation.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from memplug import torch_private
from memplug.errors import ConflictError
from memplug.session.attached import AttachedModel

FLAG, FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"
_CLASS = "CheckpointFunction"
_DEEPSPEED = "deepspeed.runtime.activation_checkpointing.checkpointing"

Apply = Callable[..., Any]


def replaces(attached: AttachedModel) -> bool:
    """Return whether the block lets memplug take over a script's checkpointing."""
    return attached.config.tokenwise.checkpointing == "replace"


def take_over(modules: Sequence[tuple[str, nn.Module]], model: nn.Module, attached: AttachedModel) -> None:
    """Take over checkpoints around the regions until the session detaches.

    Args:
        modules: the modules of the session's regions, with their names.
        model: the whole model.
        attached: the session.

    Raises:
        ConflictError: the block refuses a `CheckpointWrapper` that is around a region.
    """
    reentrant = reentrant_checkpoints()
    reentrant.begin()
    end = weakref.finalize(attached, reentrant.end)  # also if the session is just dropped
    attached.at_detach(end)
    if replaces(attached) and any(getattr(module, FLAG, False) and FUNCTION in vars(module) for _, module in modules):
        tell(attached, FLAG)
    regions = {id(module) for _, module in modules}
    wrappers = torch_private.checkpoint_wrappers()
    for wrapper in model.modules():
        if isinstance(wrapper, wrappers) and id(wrapper._checkpoint_wrapped_module) in regions:
            if not replaces(attached):
                raise ConflictError(
                    "a CheckpointWrapper is around a region, and memplug recomputes it too",
                    'Leave out the wrapper, or let memplug replace it: "tokenwise": {"checkpointing": "replace"}.',
                    code="MP002",
                )
            _call_directly(wrapper, attached)


def tell(attached: AttachedModel, what: str) -> None:
    """Log once which of the script's checkpoints memplug replaces."""
    attached.tell_once(f"replaces the script's checkpointing of regions ({what}): a plan decides what is recomputed")


def _call_directly(wrapper: Any, attached: AttachedModel) -> None:
    own = wrapper.checkpoint_fn
    wrapper.checkpoint_fn = direct = _Direct(own, attached)
    tell(attached, "CheckpointWrapper")

    def undo() -> None:
        if wrapper.checkpoint_fn is direct:
            wrapper.checkpoint_fn = own

    attached.at_detach(undo)


class _Direct:
    """Replaces a checkpoint: calls the checkpointed function directly with its arguments.

    A reentrant checkpoint without an argument that requires gradients gives parameters no gradients. Such a call still
    runs the script's checkpoint, to keep this effect; so does a call while regions run as without memplug. Copies and
    pickles contain the script's checkpoint.

    Args:
        own: the script's checkpoint, with its options bound.
        attached: the session of the region.
    """

    def __init__(self, own: Callable[..., Any], attached: AttachedModel):
        self._own, self._attached = own, weakref.ref(attached)
        options = own.keywords if isinstance(own, functools.partial) else {}
        self._may_be_reentrant = options.get("use_reentrant") is not False

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        stays = self._may_be_reentrant and not any(map(_takes_gradients, args))
        if stays or not _runs_regions(self._attached):
            return self._own(function, *args, **kwargs)
        return function(*args, **kwargs)

    def __reduce__(self) -> Any:
        return functools.partial, (self._own,)


# -- Hugging Face's flag -----------------------------------------------------------------------------------------------


class LayersFunction:
    """Descriptor for the attribute `FUNCTION`, which holds the checkpoint of a Hugging Face layer.

    Args:
        session_of: returns the session of a layer, or None if the layer is no region at present.
    """

    def __init__(self, session_of: Callable[[nn.Module], AttachedModel | None]):
        self._session_of = session_of

    def __get__(self, layer: nn.Module | None, owner: type) -> Any:
        """Return a `_Direct` for the layer's checkpoint, or that checkpoint if memplug does not replace it."""
        if layer is None:
            return self
        own = layer.__dict__.get(FUNCTION)
        attached = self._session_of(layer)
        if own is None:
            raise AttributeError(FUNCTION)
        if attached is None or not replaces(attached):
            return own
        tell(attached, FLAG)
        return _Direct(own, attached)

    def __set__(self, layer: nn.Module, function: Any) -> None:
        """Set the layer's own checkpoint."""
        layer.__dict__[FUNCTION] = function

    def __delete__(self, layer: nn.Module) -> None:
        """Delete the layer's own checkpoint."""
        if layer.__dict__.pop(FUNCTION, None) is None:
            raise AttributeError(FUNCTION)


# -- reentrant checkpoints ---------------------------------------------------------------------------------------------


class _Running(threading.local):
    """For each thread, the `_key` of the function that a reentrant checkpoint is running; None outside of one."""

    key: Any = None


class ReentrantCheckpoints:
    """Watches the process's reentrant checkpoints while a session is attached, and converts those around regions.

    A converted checkpoint is not reentrant.
    """

    def __init__(self) -> None:
        self._sessions = 0
        # the sessions whose regions a function contains, by the function's key: code, or a module
        self._by_code: dict[Any, weakref.ref[AttachedModel]] = {}
        self._by_module: weakref.WeakKeyDictionary[nn.Module, weakref.ref[AttachedModel]] = weakref.WeakKeyDictionary()
        self._replaced: list[tuple[Any, Any, Any]] = []  # Python module, its own class, memplug's class
        self._running = _Running()

    def begin(self) -> None:
        """Add a session; replace the classes of reentrant checkpoints that are not replaced already."""
        self._sessions += 1
        known = [module for module, _, _ in self._replaced]
        for module, convert in self._places():
            own = getattr(module, _CLASS, None)
            if own is not None and module not in known:
                self._replaced.append((module, own, self._following(own, convert)))
                setattr(module, _CLASS, self._replaced[-1][-1])

    def end(self) -> None:
        """Remove a session; if none is left, restore the classes of reentrant checkpoints."""
        self._sessions -= 1
        if self._sessions:
            return
        self._by_code.clear()
        self._by_module.clear()
        while self._replaced:
            module, own, following = self._replaced.pop()
            if getattr(module, _CLASS) is following:  # otherwise other code has replaced it; ours then calls `own`
                setattr(module, _CLASS, own)

    def see(self, name: str, attached: AttachedModel) -> None:
        """Note that a region runs without gradients on this thread, perhaps inside a reentrant checkpoint.

        Args:
            name: name of the region.
            attached: its session.

        Raises:
            ConflictError: the block refuses the script's own checkpointing.
        """
        key = self._running.key
        if key is None:
            return
        if not replaces(attached):
            raise ConflictError(
                f"region {name} runs inside of a reentrant checkpoint, and memplug recomputes it too",
                "Leave out the checkpoint (Hugging Face: `model.gradient_checkpointing_disable()`), or let memplug "
                'replace it: "tokenwise": {"checkpointing": "replace"}.',
                code="MP002",
            )
        self._sessions_by(key)[key] = weakref.ref(attached)
        tell(attached, "reentrant checkpoint")

    def _sessions_by(self, key: Any) -> Any:
        return self._by_module if isinstance(key, nn.Module) else self._by_code

    @staticmethod
    def _places() -> list[tuple[Any, Apply]]:
        """Return the Python modules with a `CheckpointFunction`, each with the function that converts a checkpoint."""
        places: list[tuple[Any, Apply]] = [(torch_checkpoint, _as_torchs)]
        if _DEEPSPEED in sys.modules:
            places.append((sys.modules[_DEEPSPEED], _as_deepspeeds))
        return places

    def _following(self, own: Any, convert: Apply) -> Any:
        def apply(cls: type, function: Any, *args: Any) -> Any:
            key = _key(function)
            attached = self._sessions_by(key).get(key)
            has_gradients = torch.is_grad_enabled() and any(map(_takes_gradients, args))
            if attached is not None and has_gradients and _runs_regions(attached):
                return convert(function, *args)
            outer, self._running.key = self._running.key, key
            try:
                return own.apply(function, *args)
            finally:
                self._running.key = outer

        members = {"__module__": own.__module__, "apply": classmethod(apply)}
        return type(own)(own.__name__, (own,), members)


reentrant_checkpoints = functools.cache(ReentrantCheckpoints)


def _as_torchs(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


def _as_deepspeeds(function: Any, outputs: list[Any], *args: Any) -> None:
    if sys.modules[_DEEPSPEED].get_cuda_rng_tracker().get_states():
        found = sys.modules[_DEEPSPEED].non_reentrant_checkpoint(function, *args)  # also restores generator states
    else:
        found = _as_torchs(function, True, *args)
    outputs += [found] if isinstance(found, torch.Tensor) else found


def _runs_regions(reference: weakref.ref[AttachedModel]) -> bool:
    """Return whether the session's regions would run as regions now."""
    attached = reference()
    return attached is not None and attached.executor.runs_regions


def _takes_gradients(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _key(function: Any) -> Any:
    """Return the called `nn.Module`, or else the function's code: a script may make a new closure for each call."""
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    if isinstance(owner, nn.Module) or isinstance(function, nn.Module):
        return owner if isinstance(owner, nn.Module) else function
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", type(function))
