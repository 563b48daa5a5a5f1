"""The base of all modules with FP8 state."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch

from transformer_engine import stand_in
from transformer_engine.pytorch.distributed import (
    get_distributed_world_size,
    in_fp8_activation_recompute_phase,
    is_fp8_activation_recompute_enabled,
)
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, RecipeState
from transformer_engine.pytorch.tensor import QuantizedTensor


class TransformerEngineBaseModule(torch.nn.Module):
    """Parameters, groups of ranks, and the state of FP8.

    Attributes:
        fp8_meta: "scaling_fwd" and "scaling_bwd" hold scales and amaxes, "recipe" their recipe.
        quantizers: by the same names "scaling_fwd" and "scaling_bwd", a quantizer for each tensor.
        _fp8_workspaces: weights that are quantized once for all micro-batches of a step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.name: str | None = None
        self.fp8_initialized = self.fp8 = self.fp8_calibration = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "fp8_group": None}
        self.fp8_meta_tensors_initialized = False
        self.quantizers: dict[str, Any] = {"scaling_fwd": {}, "scaling_bwd": {}}
        self.tp_group: Any = None
        self.tp_size = 1
        self.tp_group_initialized = False
        self.sequence_parallel = False
        self.param_init_meta: dict[str, tuple[Callable, Any]] = {}
        self.primary_weights_in_fp8 = False
        self.fsdp_group = None
        self._fp8_workspaces: dict[str, QuantizedTensor] = {}
        self.activation_dtype: torch.dtype | None = None
        self.wgrad_accumulation_and_reduce_hooks: list[Callable] = []

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the ranks that share this module's weight."""
        self.tp_group = tp_group
        self.tp_group_initialized = True

    def take_tensor_parallel_group(self, tp_group: Any, tp_size: int) -> None:
        """Set the group and its size, as passed to the constructor."""
        self.tp_size = tp_size if tp_group is None else get_distributed_world_size(tp_group)
        if tp_group is not None or tp_size == 1:
            self.set_tensor_parallel_group(tp_group)

    def register_parameter(
        self, name: str, param: Any, init_fn: Callable | None = None, get_rng_state_tracker: Any = None
    ) -> None:
        """Register a parameter with the function that fills it."""
        super().register_parameter(name, param)
        if init_fn is not None:
            self.param_init_meta[name] = init_fn, get_rng_state_tracker

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Fill all parameters, each from the random state of its kind."""
        if defer_init:
            return
        for name, param in list(self.named_parameters(recurse=False)):
            init_fn, get_tracker = self.param_init_meta[name]
            if get_tracker is None:
                init_fn(param)
            else:
                tracker_name = getattr(self, "rng_tracker_name", None)
                with get_tracker().fork(*([tracker_name] if tracker_name else [])):
                    init_fn(param)

    def set_activation_dtype(self, inp: torch.Tensor) -> None:
        """Set the type of products: autocast's, or else the input's; then all parameters must have the input's type."""
        if torch.is_autocast_enabled(inp.device.type):
            self.activation_dtype = torch.get_autocast_dtype(inp.device.type)
            return
        for name, param in self.named_parameters():
            assert param.dtype == inp.dtype, f"Data types for parameters must match: {name} {param.dtype} {inp.dtype}"
        self.activation_dtype = inp.dtype

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Take the recipe of the surrounding autocast, and make new state if the recipe has changed."""
        self.fp8 = FP8GlobalStateManager.is_fp8_enabled()
        self.fp8_meta["fp8_checkpoint"] = self.fp8
        if not self.fp8:
            self.fp8_initialized = False
            return
        recipe = FP8GlobalStateManager.get_fp8_recipe()
        before = self.fp8_meta.get("recipe")
        if self.fp8_initialized and recipe == before:
            return
        self.fp8_meta.update(recipe=recipe, num_gemms=num_gemms, fp8_group=FP8GlobalStateManager.get_fp8_group())
        if before is not None and type(before) is not type(recipe):
            self._fp8_workspaces.clear()
        if not self.fp8_meta_tensors_initialized or type(before) is not type(recipe):
            self.set_meta_tensor(True, recipe)
            self.set_meta_tensor(False, recipe)
        self.fp8_meta_tensors_initialized = self.fp8_initialized = True

    def set_meta_tensor(self, fwd: bool, recipe: Any) -> None:
        """Make the state for three tensors of a product in forward (input, weight, output), or two in backward."""
        name, count = ("scaling_fwd", 3) if fwd else ("scaling_bwd", 2)
        state = RecipeState.create(
            recipe,
            mode="forward" if fwd else "backward",
            num_quantizers=count * self.fp8_meta["num_gemms"],
            device=self.device_of_state,
        )
        self.fp8_meta[name] = state
        self.quantizers[name] = state.make_quantizers()
        for quantizer in self.quantizers[name]:
            quantizer.internal = True

    def _before_forward(
        self,
        inp: torch.Tensor,
        num_gemms: int = 1,
        allow_non_contiguous: bool = False,
        allow_different_data_and_param_types: bool = False,
    ) -> torch.Tensor:
        """Prepare the state of FP8 for a forward; in the recompute phase use the first run's copies."""
        if self.fp8 and in_fp8_activation_recompute_phase():
            FP8GlobalStateManager.get_old_fp8_meta_tensors_for_recompute(self.fp8_meta)
        else:
            if self.tp_size > 1:
                assert self.tp_group_initialized, "TP group not initialized."
            self.device_of_state = inp.device
            self.set_activation_dtype(inp)
            self.init_fp8_metadata(num_gemms=num_gemms)
            if self.fp8:
                FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(self.fp8_meta)
            if self.fp8 and self.training and is_fp8_activation_recompute_enabled():
                FP8GlobalStateManager.copy_forward_fp8_meta_tensors_for_recompute(self.fp8_meta)
        return inp if allow_non_contiguous or inp.is_contiguous() else inp.contiguous()

    def end_forward(self) -> None:
        """Restore the state of FP8 after a forward in the recompute phase."""
        if self.fp8 and in_fp8_activation_recompute_phase():
            FP8GlobalStateManager.restore_fp8_meta_tensors(self.fp8_meta)

    if stand_in.version >= (2, 12):
        prepare_forward = _before_forward

        @contextlib.contextmanager
        def prepare_forward_ctx(self, *args: Any, **kwargs: Any) -> Iterator[torch.Tensor]:
            """Call `prepare_forward` and `end_forward` around a forward."""
            inp = self.prepare_forward(*args, **kwargs)
            try:
                yield inp
            finally:
                self.end_forward()

    else:

        @contextlib.contextmanager
        def prepare_forward(self, *args: Any, **kwargs: Any) -> Iterator[torch.Tensor]:
            """Prepare a forward on entry, and end it on exit."""
            yield self._before_forward(*args, **kwargs)
            self.end_forward()

    def around_forward(self, inp: torch.Tensor, num_gemms: int = 1, allow_non_contiguous: bool = False) -> Any:
        """Return the context around a forward, which has another name since 2.12."""
        prepare = self.prepare_forward_ctx if stand_in.version >= (2, 12) else self.prepare_forward
        return prepare(inp, num_gemms=num_gemms, allow_non_contiguous=allow_non_contiguous)

    def get_weight_workspace(
        self,
        *,
        tensor: torch.Tensor,
        quantizer: Any,
        cache_name: str | None = None,
        update_workspace: bool = True,
        workspace_dtype: torch.dtype | None = None,
        **_: Any,
    ) -> Any:
        """Return the quantized weight; with a cache name, keep it, and let an update fill the kept memory."""
        out = self._fp8_workspaces.get(cache_name) if cache_name is not None else None
        if out is not None and quantizer.columnwise_usage and out.columnwise is None:
            del self._fp8_workspaces[cache_name]
            out = None
        if out is None:
            # autograd saves a cached weight as it is, so it has to be a tensor
            quantizer.internal = cache_name is None
            out = quantizer.quantize(tensor, dtype=workspace_dtype)
            quantizer.internal = True
            if cache_name is not None:
                self._fp8_workspaces[cache_name] = out
        elif update_workspace:
            out.quantize_(tensor)
        return out

    def backward_dw(self) -> None:
        """Compute the delayed weight gradients."""
        store = getattr(self, "wgrad_store", None)
        if store is None or not store.delay_wgrad_compute():
            return
        (wgrad, grad_bias), _ = store.pop()
        if not self.fuse_wgrad_accumulation:
            self.weight.grad = wgrad.to(self.weight.dtype)
        if grad_bias is not None and self.bias.grad is None:
            self.bias.grad = grad_bias.to(self.bias.dtype)
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable) -> None:
        """Register a hook that is called after delayed weight gradients."""
        self.wgrad_accumulation_and_reduce_hooks.append(hook)

    def get_extra_state(self) -> torch.Tensor:
        """Return scales and amaxes as bytes; empty without FP8."""
        if not (self.fp8_meta["fp8_checkpoint"] or self.fp8):
            return torch.empty(0, dtype=torch.uint8)
        state: dict[str, Any] = {"recipe": self.fp8_meta["recipe"], "extra_fp8_variables": {}}
        if state["recipe"].delayed():
            for short in ("fwd", "bwd"):
                state[f"scale_{short}"] = self.fp8_meta[f"scaling_{short}"].scale.cpu()
                state[f"amax_history_{short}"] = self.fp8_meta[f"scaling_{short}"].amax_history.cpu()
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        """Make the state for the loaded recipe, and load scales and amaxes into it."""
        if state is None or state.numel() == 0:
            return
        found = pickle.loads(state.detach().cpu().numpy().tobytes())
        self.fp8_meta["recipe"] = found["recipe"]
        self.fp8_meta.setdefault("num_gemms", getattr(self, "num_gemms", 1))
        self.device_of_state = next((parameter.device for parameter in self.parameters()), torch.device("cpu"))
        self.set_meta_tensor(True, found["recipe"])
        self.set_meta_tensor(False, found["recipe"])
        self.fp8_meta_tensors_initialized = True
        if found["recipe"].delayed():
            for short in ("fwd", "bwd"):
                self.fp8_meta[f"scaling_{short}"].scale.copy_(found[f"scale_{short}"])
                self.fp8_meta[f"scaling_{short}"].amax_history.copy_(found[f"amax_history_{short}"])
